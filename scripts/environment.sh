# Sourced by run_train.sh, run_tests.sh and titan-megamoe: puts a Python with this package on PATH.
#
#   TORCH_VERSION   torch to install into .venv (default 2.13.0). On a machine without a GPU, PyPI's wheel is the CUDA
#                   build; point pip at a CPU index to save the download (PIP_EXTRA_INDEX_URL).
#   USE_ENV=1       use the current environment as it is, as on a GPU machine that has its own torch.
#   PYTHON          interpreter that makes .venv (default python3; 3.11 or newer).
#
# The caller sets EXTRAS to the optional dependencies it needs, e.g. "[test]".

if [ "${USE_ENV:-0}" != 1 ]; then
    torch_version="${TORCH_VERSION:-2.13.0}"
    installed_for="torch==${torch_version} extras=${EXTRAS:-} $(cksum < pyproject.toml)"
    if [ ! -x .venv/bin/python ]; then
        "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            { echo "Python 3.11 or newer is needed; set PYTHON to one." >&2; exit 1; }
        echo "Making .venv" >&2
        "${PYTHON:-python3}" -m venv .venv
    fi
    # Installing takes a while, so it is skipped when the same thing is already there.
    if ! grep -qxF "$installed_for" .venv/installed 2>/dev/null; then
        echo "Installing torch ${torch_version} and titan_megamoe${EXTRAS:-} into .venv" >&2
        .venv/bin/python -m pip install --quiet --disable-pip-version-check "torch==${torch_version}"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${EXTRAS:-}"
        echo "$installed_for" >> .venv/installed
    fi
    export PATH="$PWD/.venv/bin:$PATH"
else
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
fi
