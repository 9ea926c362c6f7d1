# Sourced by scripts/serve and scripts/test: a .venv of pinned packages, made on first use and known again by its stamp.

# The Pythons for which every pinned package has a wheel, newest first.
PYTHONS="3.14 3.13 3.12"
STAMP=.venv/.setup-stamp

say() { printf '%s\n' "$*" >&2; }

# cpu, tpu or cuda: which jax this machine wants. PALLAS_SERVE_DEVICE overrides what is found.
find_device() {
    case "$OSTYPE" in
        linux*) ;;
        *) say "pallas-serve needs Linux, and this is $OSTYPE: run it in a container or a virtual machine with Linux"; return 1 ;;
    esac
    if [ -n "${PALLAS_SERVE_DEVICE:-}" ]; then
        case "$PALLAS_SERVE_DEVICE" in
            cpu | tpu | cuda) echo "$PALLAS_SERVE_DEVICE"; return ;;
            *) say "PALLAS_SERVE_DEVICE=$PALLAS_SERVE_DEVICE: it can be cpu, tpu or cuda"; return 1 ;;
        esac
    fi
    # Google's vendor id alone proves nothing (its network cards bear it too): these device ids are TPUs (v3 to v8).
    local card
    for card in "${SYS_ROOT:-}"/sys/bus/pci/devices/*; do
        [ -r "$card/vendor" ] && [ "$(cat "$card/vendor")" = 0x1ae0 ] || continue
        case "$(cat "$card/device")" in
            0x0027 | 0x0056 | 0x005e | 0x0062 | 0x0063 | 0x006f | 0x0076 | 0x007c | 0x0083) echo tpu; return ;;
        esac
    done
    if [ -e "${SYS_ROOT:-}/proc/driver/nvidia/version" ] || nvidia-smi -L >/dev/null 2>&1; then
        echo cuda
    else
        echo cpu
    fi
}

# extras_for DEVICE FLAGS...: the extras that serving needs, a line. Of gs:// there is one on TPUs, whose weights and
# programs are kept in buckets, and where a flag names one.
extras_for() {
    local device=$1 extras=""
    shift
    [ "$device" = cpu ] || extras=$device
    case "$device $*" in tpu\ * | *gs://*) extras="$extras gcs" ;; esac
    echo $extras
}

usable_python() {
    "$1" -c 'import sys, sysconfig, venv, ensurepip
sys.exit(sys.version_info[:2] < (3, 12) or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' >/dev/null 2>&1
}

# The newest usable Python on the PATH or under pyenv.
find_python() {
    local version candidate
    for version in $PYTHONS; do
        for candidate in "python$version" \
            $(ls -d "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$version".*/bin/python"$version" 2>/dev/null | sort -rV); do
            if candidate=$(command -v "$candidate") && usable_python "$candidate"; then
                echo "$candidate"
                return
            fi
        done
    done
    return 1
}

# uv on the PATH, or where its installer and `pip install --user` put it: a PATH need not lead there.
find_uv() {
    command -v uv || command -v "${HOME:-}/.local/bin/uv" || command -v "${HOME:-}/.cargo/bin/uv"
}

make_venv() {
    local python uv
    if python=$(find_python); then
        say "set-up: .venv with $("$python" --version) ($python)"
        "$python" -m venv --clear --without-pip .venv
    elif uv=$(find_uv); then
        say "set-up: no Python 3.12 to 3.14 with its venv module here: uv makes the .venv"
        "$uv" venv --quiet --clear --seed --python '>=3.12,<3.15' .venv
    else
        say "pallas-serve needs Python 3.12, 3.13 or 3.14 with its venv module, or uv, which fetches one. Type:" \
            "curl -LsSf https://astral.sh/uv/install.sh | sh && $0"
        return 1
    fi
}

# The uv that installs: one that is here, or one that pip brings.
installing_uv() {
    find_uv && return
    [ -x .venv/bin/uv ] || run_pip install --constraint scripts/constraints.txt --only-binary :all: uv >&2 || return 1
    [ -x .venv/bin/uv ] && echo .venv/bin/uv
}

# The Python whose pip installs into .venv: that of .venv, or the one which has made it.
pip_python() {
    local python
    for python in .venv/bin/python "$(readlink -f .venv/bin/python)"; do
        "$python" -m pip --version >/dev/null 2>&1 && echo "$python" && return
    done
    .venv/bin/python -m ensurepip >/dev/null && echo .venv/bin/python
}

run_pip() {
    local python
    python=$(pip_python) && "$python" -m pip --python .venv/bin/python "$1" -qq --disable-pip-version-check "${@:2}"
}

# Exports pip's settings under uv's names: uv does not read them. Variables of uv that are set count first.
obey_pip() {
    local settings section variable name value
    settings=$("$(pip_python)" -m pip config list 2>/dev/null) || settings=""
    while read -r variable name; do
        value=$(for section in :env: install global; do
            sed -n "s/^$section\.$name='\(.*\)'\$/\1/p" <<<"$settings"
        done)
        value=${value%%$'\n'*} value=${value//\\n/ }
        [ "$variable" != UV_FIND_LINKS ] || value=${value// /,}
        [ -z "$value" ] || [ -n "${!variable:-}" ] || export "$variable=$value"
    done <scripts/uv_variables.txt
    # As pip does: of all indexes the best version, and the system's certificates.
    export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match} UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true}
}

# Compiles on all cores what a start imports. Python compiles other modules when they are imported first. A module that
# does not compile is one that nothing imports.
compile_modules() {
    local own="batcher/|model/|pallas_kernels/|server/|scripts/(?!lab/)" packages
    packages=$(grep -v '^#' scripts/imported.txt)
    .venv/bin/python -m compileall -qq -j 0 \
        -x "^\./(?!$own|\.venv/lib/[^/]*/site-packages/(${packages//$'\n'/|})[/.])|/(_?tests?|jax2tf|f2py)/" . || true
}

digest() { { sha256sum 2>/dev/null || shasum -a 256; } | cut -d' ' -f1; }

# setup EXTRA...: a .venv that has at least these extras of pyproject.toml. Run from the checkout's root.
setup() {
    local wanted have extra missing="" started=$SECONDS
    wanted=$(cat pyproject.toml scripts/*.txt scripts/setup.sh | digest)
    have=" "
    if [ -x .venv/bin/python ] && [ -f "$STAMP" ] && [ "$(head -n 1 "$STAMP")" = "$wanted" ]; then
        have=" $(sed -n 2p "$STAMP") "
        for extra in core "$@"; do
            case "$have" in *" $extra "*) ;; *) missing=1 ;; esac
        done
        [ -z "$missing" ] && return
    fi
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] < (3, 12))' 2>/dev/null; then
        make_venv || return 1
    fi
    # Extras that an earlier set-up brought stay: scripts/serve and scripts/test share one .venv.
    local all="$*"
    for extra in $have; do
        case " core $all " in *" $extra "*) ;; *) all="$all $extra" ;; esac
    done
    set -- $all
    say "set-up: installing the pinned packages (extras: ${*:-none}); minutes the first time"
    rm -f "$STAMP"
    local uv extras pins=scripts/constraints.txt
    extras=$(IFS=, && echo "$*")
    local packages=(--constraint $pins --build-constraint $pins pip --editable ".${extras:+[$extras]}")
    if ! { uv=$(installing_uv) && (obey_pip && "$uv" pip install -q --python .venv/bin/python "${packages[@]}"); }; then
        say "set-up: uv cannot install the packages here (see above): pip does, which takes longer"
        # Only a new pip knows --build-constraint.
        run_pip install "$(grep '^pip==' $pins)" && run_pip install --no-compile "${packages[@]}" || {
            say "set-up: pip could not install the packages (see above)"
            return 1
        }
    fi
    compile_modules
    printf '%s\ncore %s\n' "$wanted" "$*" >"$STAMP"
    say "set-up: done in $((SECONDS - started)) s"
}
