#!/usr/bin/env bash
# Delete the TPU VM and everything on its disk.
USAGE='delete.sh --name NAME --zone ZONE [--queued] [--yes]

Delete the TPU VM and everything on its disk; copy the runs you want to keep before.
  --queued             delete the queued resource of that name, with its VM
  --yes                do not ask'
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_settings "$@"
queued=0 yes=0
for argument in ${REST[@]+"${REST[@]}"}; do
  case "$argument" in
    --queued) queued=1 ;;
    --yes) yes=1 ;;
    *) die "unknown argument '$argument'; see --help" 2 ;;
  esac
done
need_gcloud
set_where
if [ "$DRY_RUN" -eq 0 ]; then
  if [ "$queued" -eq 0 ] && [ -z "$(vm_field state)" ]; then
    die "no TPU VM '$TPU_NAME' in zone $TPU_ZONE of project $TPU_PROJECT; nothing was deleted"
  fi
  if [ "$yes" -eq 0 ]; then
    printf "Delete TPU VM '%s' (zone %s, project %s) with everything on its disk? Type its name: " "$TPU_NAME" "$TPU_ZONE" "$TPU_PROJECT" >&2
    answer=
    read -r answer || true
    [ "$answer" = "$TPU_NAME" ] || die "nothing was deleted" 3
  fi
fi
if [ "$queued" -eq 1 ]; then
  run gcloud compute tpus queued-resources delete "$TPU_NAME" "${WHERE[@]}" --force --quiet
else
  run gcloud compute tpus tpu-vm delete "$TPU_NAME" "${WHERE[@]}" --quiet
fi
