#!/usr/bin/env bash
# Runs on a host, as root: starts the server as a systemd unit, or again with other flags. serve.sh FLAGS...
set -euo pipefail
cd "$(dirname "$0")/../../.."
etc="${SYS_ROOT:-}/etc"
# systemd splits $FLAGS at white space and knows quotes of its own: a flag has neither.
for flag in "$@"; do
    case "$flag" in
        *[[:space:]\"\'\\]*) printf '%s\n' "serve.sh: white space, quotes and backslashes cannot be in a flag: $flag" >&2; exit 2 ;;
    esac
done
install -D -m 644 scripts/deploy/host/pallas-serve@.service "$etc/systemd/system/pallas-serve@.service"
install -d -m 755 "$etc/pallas-serve"
printf 'FLAGS="%s"\n' "$*" >"$etc/pallas-serve/flags.env"
systemctl daemon-reload
systemctl enable pallas-serve@0
systemctl restart pallas-serve@0
