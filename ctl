#!/bin/sh
# Runs llmgw's command line; on first use, and when the lock changed, makes .venv beside itself first.
# LLMGW_PYTHON names the Python to make it with, where the one found is not the one you want.
set -eu

self=$0
while [ -L "$self" ]; do
    target=$(readlink "$self")
    case $target in
        /*) self=$target ;;
        *) self=$(dirname -- "$self")/$target ;;
    esac
done
root=$(CDPATH='' cd -- "$(dirname -- "$self")" && pwd -P)
python=$root/.venv/bin/python

stamp() {
    echo "$1 $(cksum <"$root/requirements/$1.txt")"
}

kind=runtime
[ "${1-}" != test ] || kind=dev
for argument; do
    case $argument in -h | --help) kind=runtime ;; esac  # help needs no tools
done
have=
[ ! -r "$root/.venv/llmgw-stamp" ] || read -r have <"$root/.venv/llmgw-stamp" || true
case $have in dev\ *) kind=dev ;; esac  # a developer's stays one when the locks change
want=$(stamp "$kind")
also=$(stamp dev)  # holds everything of runtime, in the same versions

# PATH without .venv: that one has no pip, and cannot be what it is made with.
outside() {
    rest=$PATH:
    kept=
    while [ -n "$rest" ]; do
        entry=${rest%%:*}
        rest=${rest#*:}
        [ "$entry" -ef "$root/.venv/bin" ] || kept=$kept:$entry
    done
    echo "${kept#:}"
}

find_python() {
    PATH=$(outside)
    for name in "${LLMGW_PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
        case $name in "$root/.venv/"*) continue ;; esac
        # Run it: a name on the PATH may be a shim of a version that is not installed.
        if [ -n "$name" ] && "$name" -c "$1" >/dev/null 2>&1; then
            command -v -- "$name"
            return
        fi
    done
    return 1
}

if [ ! -x "$python" ] || { [ "$have" != "$want" ] && [ "$have" != "$also" ]; }; then
    version='import sys; sys.exit(sys.version_info < (3, 11))'
    if ! base=$(find_python "import pip; $version"); then
        if base=$(find_python "$version"); then
            echo "ctl: $base has no pip: install it (on Debian and Ubuntu: apt install python3-pip), or name another Python in LLMGW_PYTHON" >&2
        else
            echo "ctl: no Python 3.11 or later was found: install one, or name it in LLMGW_PYTHON" >&2
        fi
        exit 1
    fi
    "$base" -I "$root/cli/bootstrap.py" "$root" "$kind" "$want" "$also"
fi

unset PYTHONHOME PYTHONSAFEPATH
# -P: a module of the same name in the current directory must not stand in for ours.
export PYTHONPATH="$root"
exec "$python" -P -m cli "$@"
