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
        "$python" -m venv --clear .venv
    elif uv=$(find_uv); then
        say "set-up: no Python 3.12 to 3.14 with its venv module here: uv makes the .venv"
        "$uv" venv --quiet --clear --seed --python '>=3.12,<3.15' .venv
    else
        say "pallas-serve needs Python 3.12, 3.13 or 3.14 with its venv module, or uv, which fetches one. Type:" \
            "curl -LsSf https://astral.sh/uv/install.sh | sh && $0"
        return 1
    fi
}

# pip compiles one module after the other; here all cores do. Nothing imports the models of transformers, a third of the
# work. A module that does not compile is one that nothing imports; pip passes over such modules, too.
compile_modules() {
    .venv/bin/python -m compileall -qq -j 0 -x 'transformers/models/(?!(auto|llama|encoder_decoder)/)' .venv/lib || true
}

digest() { { sha256sum 2>/dev/null || shasum -a 256; } | cut -d' ' -f1; }

# setup EXTRA...: a .venv that has at least these extras of pyproject.toml. Run from the checkout's root.
setup() {
    local wanted have extra missing="" started=$SECONDS
    wanted=$(cat pyproject.toml scripts/constraints.txt scripts/setup.sh | digest)
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
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$(grep '^pip==' scripts/constraints.txt)" || return 1
    .venv/bin/python -m pip install -qq --disable-pip-version-check --no-compile \
        --constraint scripts/constraints.txt --build-constraint scripts/constraints.txt \
        --editable ".$([ $# -eq 0 ] || (IFS=, && echo "[$*]"))" || {
        say "set-up: pip could not install the packages (see above)"
        return 1
    }
    compile_modules
    printf '%s\ncore %s\n' "$wanted" "$*" >"$STAMP"
    say "set-up: done in $((SECONDS - started)) s"
}
