#!/usr/bin/env bash
# Cloud TPUs: creates a slice, installs this checkout on its hosts, and serves.
#   tpu_vm.sh create|setup|serve|status|logs|ssh|delete --name NAME --zone ZONE --target v6e:2x4 [OPTIONS]
# Two APIs have TPUs: the Cloud TPU API (v5e, v5p, v6e) and Compute Engine (v5p, v6e, tpu7x).
# It runs in bash 3.2, which macOS has: no mapfile, and an array that may be empty is read as ${x[@]+"${x[@]}"}.
set -euo pipefail
cd "$(dirname "$0")/../.."

usage() {
    cat <<'END'
tpu_vm.sh VERB --name NAME --zone ZONE --target TARGET [OPTIONS] [-- MORE]

verbs
  create             the slice: one host, or several
  setup              copies this checkout to every host and installs it (again: brings it up to date)
  serve -- FLAGS     starts the server on every host as a systemd unit; FLAGS are those of scripts/serve
  status             of the slice, of the unit on every host, and of the server
  logs [-- FLAGS]    of every host's unit; FLAGS are journalctl's
  ssh [-- COMMAND]   on every host; without a command, a shell on the first
  delete             the slice, with all that create made

options
  --target TARGET    v5e:2x2, v6e:1x1, v6e:2x4, v6e:4x4, v5p:2x2x1, tpu7x:2x2x1, ... as in scripts/plan
  --project ID       default: gcloud's
  --api tpu|compute  default: compute where it has the chip, else tpu
  --provisioning on-demand|spot|flex-start|queued
                     queued: waits in the Cloud TPU API's queue. flex-start: waits, and runs for --run-for at most
  --wait-for 2h      how long a queued or flex-start request stays in the queue; at most 2h for flex-start of Compute Engine
  --run-for 24h      of flex-start: the slice is deleted after that
  --boot-disk-size 200GB
                     of a Compute Engine host: 70B from the hub takes 400GB, from a bucket 200GB; --api tpu has no such setting
  --dry-run          prints every command and runs none
END
}

say() { printf '%s\n' "tpu_vm.sh: $*" >&2; }
refuse() { say "$*"; exit 2; }

# --- the flags ---

verb=${1:-}
case "$verb" in
    create | setup | serve | status | logs | ssh | delete) shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; refuse "${verb:-no verb}: it can be create, setup, serve, status, logs, ssh or delete" ;;
esac
name='' zone='' target='' project='' api='' provisioning=on-demand wait_for=2h run_for=24h boot_disk_size='' dry_run='' more=()
while [ $# -gt 0 ]; do
    case "$1" in
        --dry-run) dry_run=1; shift ;;
        --name | --zone | --target | --project | --api | --provisioning | --wait-for | --run-for | --boot-disk-size)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            case "$1" in
                --name) name=$2 ;; --zone) zone=$2 ;; --target) target=$2 ;; --project) project=$2 ;; --api) api=$2 ;;
                --provisioning) provisioning=$2 ;; --wait-for) wait_for=$2 ;; --run-for) run_for=$2 ;;
                --boot-disk-size) boot_disk_size=$2 ;;
            esac
            shift 2 ;;
        --) shift; more=("$@"); break ;;
        *) refuse "$1: an unknown option (see --help)" ;;
    esac
done
[[ "$name" =~ ^[a-z]([-a-z0-9]{0,50}[a-z0-9])?$ ]] || refuse "--name '$name': lower-case letters, digits and hyphens"
[[ "$zone" =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || refuse "--zone '$zone': it looks like us-east5-b"
[[ "$target" =~ ^(v5e|v5p|v6e|tpu7x):([0-9]+)x([0-9]+)(x([0-9]+))?$ ]] ||
    refuse "--target '$target': a TPU and its topology, such as v6e:2x4"
chip=${BASH_REMATCH[1]} topology=${target#*:}
chips=$((BASH_REMATCH[2] * BASH_REMATCH[3] * ${BASH_REMATCH[5]:-1}))
[ "$chips" -gt 0 ] || refuse "--target $target: no chips"
[ -n "$api" ] || { [ "$chip" = v5e ] && api=tpu || api=compute; }
[ "$provisioning" = queued ] && [ "$chip" != tpu7x ] && api=tpu
case "$api" in tpu | compute) ;; *) refuse "--api $api: it can be tpu or compute" ;; esac
[ "$api/$chip" != tpu/tpu7x ] || refuse "--api tpu: the Cloud TPU API has no tpu7x; take --api compute"
[ "$api/$chip" != compute/v5e ] || refuse "--api compute: Compute Engine has no v5e; take --api tpu"
case "$provisioning" in
    on-demand | spot | flex-start) ;;
    queued) [ "$api" = tpu ] || refuse "--provisioning queued: only the Cloud TPU API has it; take flex-start" ;;
    *) refuse "--provisioning $provisioning: it can be on-demand, spot, flex-start or queued" ;;
esac
# seconds FLAG DURATION: 90m, 2h or 1d12h.
seconds() {
    local rest=$2 total=0 unit
    while [[ "$rest" =~ ^([0-9]+)([smhd])(.*)$ ]]; do
        case "${BASH_REMATCH[2]}" in s) unit=1 ;; m) unit=60 ;; h) unit=3600 ;; d) unit=86400 ;; esac
        total=$((total + 10#${BASH_REMATCH[1]} * unit))
        rest=${BASH_REMATCH[3]}
    done
    if [ -n "$rest" ] || [ "$total" = 0 ]; then refuse "$1 '$2': it looks like 90m, 2h or 1d12h"; fi
    echo "$total"
}

wait_for_s=$(seconds --wait-for "$wait_for")
seconds --run-for "$run_for" >/dev/null
if [ "$api/$provisioning" = compute/flex-start ] && [ "$wait_for_s" -gt 7200 ]; then
    refuse "--wait-for $wait_for: a flex-start request of Compute Engine waits for 2h at most; take --api tpu (v5p, v6e) or create it again"
fi
[ "$api" = compute ] || [ -z "$boot_disk_size" ] ||
    refuse "--boot-disk-size $boot_disk_size: the Cloud TPU API has no such setting; take --api compute (v5p, v6e), or weights from a bucket"

# Chips of a host: all of a slice of up to 8 (v5e, v6e), else 4.
per_host=4
case "$chip" in v5e | v6e) [ "$chips" -gt 8 ] || per_host=$chips ;; esac
num_hosts=$(((chips + per_host - 1) / per_host))
place=(--zone "$zone")
[ -z "$project" ] || place+=(--project "$project")

# --- running commands ---

exec 4>&1 # for commands that a dry run prints where the output is read

# Prints a command in a dry run, else runs it.
run() {
    if [ -n "$dry_run" ]; then printf '%q ' "$@"; printf '\n'; else "$@"; fi
}

# As run, for gcloud: its known failures are also said in plain words.
cloud() {
    local errors status=0
    if [ -n "$dry_run" ]; then run gcloud "$@"; return; fi
    errors=$(mktemp)
    { gcloud "$@" 2>&1 >&3 | tee "$errors" >&2; } 3>&1 || status=$?
    if [ "$status" != 0 ]; then
        if grep -qiE 'was not found|NOT_FOUND' "$errors"; then
            say "there is no $name now: a flex-start slice is deleted --run-for after its start, a spot one when its chips are needed, and a request that had no chips within --wait-for is dropped; create it again"
        elif grep -qi 'already exists' "$errors"; then
            say "$name exists already: see it with status, remove it with delete, or take another --name"
        elif grep -qiE 'quota' "$errors"; then
            say "the project's quota for $chip in $zone is too small: ask for more (IAM & Admin, Quotas) or change --zone"
        elif grep -qiE 'no more capacity|stockout|resource_pool_exhausted|insufficient capacity|does not have enough' "$errors"; then
            say "$zone has no free $chip now: take --provisioning queued or flex-start, spot, or another --zone"
        elif grep -qiE 'permission|forbidden|not been used in project|is disabled' "$errors"; then
            say "the account may not do this, or the API is not enabled: gcloud services enable tpu.googleapis.com compute.googleapis.com"
        fi
    fi
    rm -f "$errors"
    return "$status"
}

# --- the slice ---

accelerator_type() {
    case "$chip" in
        v5e) echo "v5litepod-$chips" ;;
        v5p) echo "v5p-$((2 * chips))" ;; # counts cores
        *) echo "$chip-$chips" ;;
    esac
}

runtime_version() {
    case "$chip" in v5e) echo v2-alpha-tpuv5-lite ;; v5p) echo v2-alpha-tpuv5 ;; v6e) echo v2-alpha-tpuv6e ;; esac
}

machine_type() {
    case "$chip" in
        v6e) echo "ct6e-standard-${per_host}t" ;;
        v5p) echo ct5p-hightpu-4t ;;
        tpu7x) echo tpu7x-standard-4t ;;
    esac
}

create_tpu() {
    local queue=(compute tpus queued-resources create "$name" "${place[@]}" --node-id "$name"
        --accelerator-type "$(accelerator_type)" --runtime-version "$(runtime_version)")
    case "$provisioning" in
        on-demand | spot)
            local spot=()
            [ "$provisioning" = on-demand ] || spot=(--spot)
            cloud compute tpus tpu-vm create "$name" "${place[@]}" --accelerator-type "$(accelerator_type)" \
                --version "$(runtime_version)" ${spot[@]+"${spot[@]}"} ;;
        queued) cloud "${queue[@]}" --valid-until-duration "$wait_for" ;;
        flex-start)
            cloud alpha "${queue[@]}" --provisioning-model=flex-start --max-run-duration "$run_for" \
                --valid-until-duration "$wait_for" ;;
    esac
}

# What Compute Engine needs for one host, alone or as a template.
machine() {
    local family=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e disk=()
    [ "$chip" != tpu7x ] || { family=ubuntu-accel-2404-amd64-tpu-tpu7x; disk=(--boot-disk-type hyperdisk-balanced); }
    printf '%s\n' --machine-type "$(machine_type)" --image-project ubuntu-os-accelerator-images --image-family "$family" \
        --maintenance-policy TERMINATE --boot-disk-size "${boot_disk_size:-200GB}" ${disk[@]+"${disk[@]}"} --scopes cloud-platform
    case "$provisioning" in
        spot) printf '%s\n' --provisioning-model SPOT --instance-termination-action DELETE ;;
        flex-start)
            printf '%s\n' --provisioning-model FLEX_START --instance-termination-action DELETE \
                --max-run-duration "$run_for" --request-valid-for-duration "$wait_for" ;;
    esac
}

create_compute() {
    local flag flags=() bulk=() region=${zone%-*} global=()
    [ -z "$project" ] || global=(--project "$project")
    while IFS= read -r flag; do flags+=("$flag"); done < <(machine)
    if [ "$num_hosts" = 1 ]; then
        cloud compute instances create "$name" "${place[@]}" ${flags[@]+"${flags[@]}"}
        return
    fi
    [ "$provisioning" != flex-start ] || bulk=(--target-size-policy-mode bulk) # all hosts at once, or none yet
    cloud compute resource-policies create workload-policy "$name" --region "$region" ${global[@]+"${global[@]}"} \
        --type HIGH_THROUGHPUT --accelerator-topology "$topology"
    cloud compute instance-templates create "$name" ${global[@]+"${global[@]}"} ${flags[@]+"${flags[@]}"}
    cloud compute instance-groups managed create "$name" "${place[@]}" --size "$num_hosts" --template "$name" ${bulk[@]+"${bulk[@]}"} \
        --workload-policy "projects/$(project_id)/regions/$region/resourcePolicies/$name"
}

project_id() {
    if [ -n "$project" ]; then echo "$project"; elif [ -n "$dry_run" ]; then echo PROJECT; else gcloud config get-value project 2>/dev/null; fi
}

delete_slice() {
    local region=${zone%-*} global=()
    [ -z "$project" ] || global=(--project "$project")
    if [ "$api" = tpu ]; then
        case "$provisioning" in
            queued | flex-start) cloud compute tpus queued-resources delete "$name" "${place[@]}" --force --quiet ;;
            *) cloud compute tpus tpu-vm delete "$name" "${place[@]}" --quiet ;;
        esac
    elif [ "$num_hosts" = 1 ]; then
        cloud compute instances delete "$name" "${place[@]}" --quiet
    else
        cloud compute instance-groups managed delete "$name" "${place[@]}" --quiet
        cloud compute instance-templates delete "$name" ${global[@]+"${global[@]}"} --quiet
        cloud compute resource-policies delete "$name" --region "$region" ${global[@]+"${global[@]}"} --quiet
    fi
}

# --- its hosts ---

# The names of Compute Engine's hosts, a line each.
hosts() {
    if [ "$num_hosts" = 1 ]; then
        echo "$name"
    elif [ -n "$dry_run" ]; then
        local i
        for ((i = 0; i < num_hosts; i++)); do echo "$name-HOST$i"; done
    else
        gcloud compute instance-groups managed list-instances "$name" "${place[@]}" --format 'value(instance.basename())'
    fi
}

# The same in the order of their worker numbers, which their metadata servers have: the group lists them in another.
hosts_in_order() {
    local host names number lines='' ask='curl --silent --fail --header Metadata-Flavor:Google '
    ask+='metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number'
    names=$(hosts)
    if [ -n "$dry_run" ]; then
        for host in $names; do run gcloud compute ssh "$host" "${place[@]}" --command "$ask" >&4; done
        echo "$names"
        return
    fi
    for host in $names; do
        if ! number=$(gcloud compute ssh "$host" "${place[@]}" --command "$ask") || [ -z "$number" ]; then
            say "$host does not tell its worker number: the hosts are taken in the order of the group"
            echo "$names"
            return
        fi
        lines+="$number $host"$'\n'
    done
    printf '%s' "$lines" | sort -n | cut -d' ' -f2
}

# Runs a command on every host. With a second argument, Compute Engine's hosts get the flags of their places in it:
# the Cloud TPU API's find each other through their metadata server.
on_hosts() {
    local host names first i=0 place_flags=''
    if [ "$api" = tpu ]; then
        run gcloud compute tpus tpu-vm ssh "$name" "${place[@]}" --worker=all --command "$1"
        return
    fi
    names=$(if [ -n "${2:-}" ]; then hosts_in_order; else hosts; fi)
    [ -n "$names" ] || { say "$name has no hosts yet"; return 1; }
    first=${names%%$'\n'*}
    for host in $names; do
        [ -z "${2:-}" ] || place_flags=" --coordinator $first --num-hosts $num_hosts --host-id $((i++))"
        run gcloud compute ssh "$host" "${place[@]}" --command "$1$place_flags"
    done
}

copy_to_hosts() {
    local host names
    if [ "$api" = tpu ]; then
        run gcloud compute tpus tpu-vm scp "$1" "$name:$2" "${place[@]}" --worker=all
        return
    fi
    names=$(hosts)
    for host in $names; do
        run gcloud compute scp "$1" "$host:$2" "${place[@]}"
    done
}

setup() {
    local folder
    folder=$(mktemp -d)
    run git archive --format tgz --output "$folder/pallas-serve.tgz" HEAD
    copy_to_hosts "$folder/pallas-serve.tgz" pallas-serve.tgz
    # shellcheck disable=SC2016 # the host's own user
    on_hosts 'sudo install -d -o "$(id -un)" /opt/pallas-serve && tar -xzf pallas-serve.tgz -C /opt/pallas-serve && '"\
/opt/pallas-serve/scripts/deploy/host/setup.sh tpu"
    if [ "$num_hosts" -gt 1 ]; then # they prove to each other who they are
        (umask 077 && printf 'PALLAS_SERVE_HOSTS_SECRET=%s\n' "$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')" \
            >"$folder/hosts.env")
        copy_to_hosts "$folder/hosts.env" hosts.env
        on_hosts 'sudo install -D -m 600 hosts.env /etc/pallas-serve/hosts.env && rm hosts.env'
    fi
    rm -rf "$folder"
}

serve() {
    local words='' word
    for word in "$@"; do words+=" $(printf '%q' "$word")"; done
    local own=''
    [ "$num_hosts" = 1 ] || own=1
    on_hosts "sudo /opt/pallas-serve/scripts/deploy/host/serve.sh --device tpu$words" "$own"
}

status() {
    local describe=(compute instances describe)
    if [ "$api" = tpu ]; then
        describe=(compute tpus tpu-vm describe)
        [ "$provisioning" = on-demand ] || [ "$provisioning" = spot ] || describe=(compute tpus queued-resources describe)
    elif [ "$num_hosts" -gt 1 ]; then
        describe=(compute instance-groups managed describe)
    fi
    cloud "${describe[@]}" "$name" "${place[@]}"
    on_hosts 'systemctl --no-pager --lines 3 status pallas-serve@0; curl --silent --show-error localhost:8000/health'
}

case "$verb" in
    create)
        "create_$api"
        [ "$provisioning" != flex-start ] || say "$name waits for chips for $wait_for, and is deleted $run_for after its start" ;;
    setup) setup ;;
    serve) serve ${more[@]+"${more[@]}"} ;;
    status) status ;;
    logs)
        [ ${#more[@]} -gt 0 ] || more=(--lines=100)
        on_hosts "sudo journalctl --no-pager --unit pallas-serve@0 $(printf '%q ' ${more[@]+"${more[@]}"})" ;;
    ssh)
        if [ ${#more[@]} -gt 0 ]; then
            on_hosts "$(printf '%q ' ${more[@]+"${more[@]}"})"
        elif [ "$api" = tpu ]; then
            run gcloud compute tpus tpu-vm ssh "$name" "${place[@]}" --worker=0
        else
            run gcloud compute ssh "$(hosts | head -n 1)" "${place[@]}"
        fi ;;
    delete) delete_slice ;;
esac
