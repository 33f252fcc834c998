#!/usr/bin/env bash
# Make a TPU VM and wait until it is ready.
USAGE='create.sh --name NAME --zone ZONE --type TYPE [--spot] [--queued] [--runtime VERSION] [--force]

Make a TPU VM and wait until it is ready.
  --type TYPE          accelerator type, such as v5litepod-8 or v6e-8 (or JAXRL_TPU_TYPE)
  --runtime VERSION    runtime version; by default the one of the type (or JAXRL_TPU_RUNTIME)
  --spot               cheaper capacity that may be taken away
  --queued             wait in the queue of queued resources; the request has the name of the VM, and one that exists is only waited for
  --force              make a slice of more than one host, which launch.sh refuses'
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_settings "$@"
type="${JAXRL_TPU_TYPE:-}" runtime="${JAXRL_TPU_RUNTIME:-}" spot=0 queued=0 force=0
set -- ${REST[@]+"${REST[@]}"}
while [ $# -gt 0 ]; do
  case "$1" in
    --type) value_of "$1" $#; type="$2"; shift 2 ;;
    --runtime) value_of "$1" $#; runtime="$2"; shift 2 ;;
    --spot) spot=1; shift ;;
    --queued) queued=1; shift ;;
    --force) force=1; shift ;;
    *) die "unknown argument '$1'; see --help" 2 ;;
  esac
done
[ -n "$type" ] || die "no accelerator type: pass --type TYPE, such as v5litepod-8" 2
# One host has eight chips (v5litepod, v6e) or eight cores (v4, v5p) at most.
if [[ "$type" =~ -([0-9]+)$ ]] && [ "$((10#${BASH_REMATCH[1]}))" -gt 8 ] && [ "$force" -eq 0 ]; then
  die "'$type' has more than one host, and a run uses one: launch.sh would refuse it. Take a type of one host, such as v5litepod-8 or v6e-8, or pass --force" 2
fi
if [ -z "$runtime" ]; then
  case "$type" in
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v4-*) runtime=tpu-ubuntu2204-base ;;
    *) die "no runtime version is known for type '$type'; pass --runtime VERSION" 2 ;;
  esac
fi

need_gcloud
set_where
request=
if [ "$DRY_RUN" -eq 0 ] && [ "$queued" -eq 1 ]; then
  [ -n "$DEADLINE_IS_GIVEN" ] || TPU_DEADLINE_S=86400
  request="$(described queued-resources state.state)"
fi
if [ "$DRY_RUN" -eq 0 ] && [ -z "$request" ]; then
  state="$(vm_field state)"
  [ -z "$state" ] || die "TPU VM '$TPU_NAME' exists already ($state); delete it with delete.sh or take another name"
fi
flags=("${WHERE[@]}" "--accelerator-type=$type")
[ "$spot" -eq 0 ] || flags+=(--spot)
if [ "$queued" -eq 0 ]; then
  run gcloud compute tpus tpu-vm create "$TPU_NAME" "${flags[@]}" "--version=$runtime"
  need_vm
else
  if [ -n "$request" ]; then
    say "a request '$TPU_NAME' is in the queue already; waiting for it, with the type and the flags that it was made with"
  else
    run gcloud compute tpus queued-resources create "$TPU_NAME" "--node-id=$TPU_NAME" "${flags[@]}" "--runtime-version=$runtime"
  fi
  show gcloud compute tpus queued-resources describe "$TPU_NAME" "${WHERE[@]}" '--format=value(state.state)'
  until_s=$((SECONDS + TPU_DEADLINE_S)) last='' state=unknown
  while [ "$DRY_RUN" -eq 0 ]; do
    # One look of many that fails (the network, a busy service) does not end a wait of hours.
    if now="$(described queued-resources state.state)"; then
      state="${now:-gone}"
    fi
    [ "$state" = "$last" ] || say "queued resource '$TPU_NAME': $state"
    last="$state"
    case "$state" in
      ACTIVE) break ;;
      gone) die "there is no request '$TPU_NAME' any more: it was removed while this waited" ;;
      FAILED | SUSPENDED) die "the request for '$TPU_NAME' is $state; see: gcloud compute tpus queued-resources describe; remove it with delete.sh --queued" ;;
    esac
    [ "$SECONDS" -lt "$until_s" ] || die "'$TPU_NAME' is still $state after $TPU_DEADLINE_S s; it stays in the queue: wait for it with the same command again (longer with --deadline), or remove it with delete.sh --queued" 4
    sleep "$TPU_POLL_S"
  done
  need_vm
fi
say "next: sync.sh, setup.sh, launch.sh"
