#!/usr/bin/env bash
# Runs on a host: installs the checkout that it lies in. setup.sh tpu|cuda
# The images of TPU VMs have Python 3.10 or 3.12, without venv: uv fetches another.
set -euo pipefail
cd "$(dirname "$0")/../../.."
device=${1:?setup.sh tpu|cuda}
. scripts/setup.sh
if ! find_python >/dev/null && ! find_uv >/dev/null; then
    say "no Python 3.12 to 3.14 here ($(python3 --version 2>&1)): installing uv"
    python3 -m pip install --user --quiet uv || curl --fail --silent --show-error --location https://astral.sh/uv/install.sh | sh
fi
setup "$device" gcs
