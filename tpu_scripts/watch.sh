#!/usr/bin/env bash
# Follow a run's output; connects again when the connection breaks.
USAGE='watch.sh --name NAME --zone ZONE [--lines N] [--metrics]

Follow launch.log and connect again when the connection breaks. Ctrl-C ends the watching, not the run.
  --lines N            lines to begin with (40)
  --metrics            follow metrics.jsonl of the newest run instead'
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_settings "$@"
lines=40 metrics=0
set -- ${REST[@]+"${REST[@]}"}
while [ $# -gt 0 ]; do
  case "$1" in
    --lines) value_of "$1" $#; lines="$2"; shift 2 ;;
    --metrics) metrics=1; shift ;;
    *) die "unknown argument '$1'; see --help" 2 ;;
  esac
done
[[ "$lines" =~ ^[0-9]+$ ]] || die "--lines must be a whole number, got '$lines'" 2
need_gcloud
set_where
need_vm
command="cd $(remote_dir) && tail -n $lines -F launch.log"
# shellcheck disable=SC2016  # expanded on the VM
[ "$metrics" -eq 0 ] || command="cd $(remote_dir) && tail -n $lines -F \"\$(ls -td runs/*/ | head -n 1)metrics.jsonl\""
trap 'exit 0' INT
while true; do
  code=0
  on_workers 0 "$command" || code=$?
  [ "$DRY_RUN" -eq 0 ] || exit 0
  [ "$code" -ne 130 ] || exit 0
  need_vm
  say "the connection ended ($code); connecting again in $TPU_POLL_S s (Ctrl-C ends the watching)"
  sleep "$TPU_POLL_S"
done
