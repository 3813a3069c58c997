"""The fused kernels. Importing this package does not import Triton: its modules do, and need it only where they are
used."""
