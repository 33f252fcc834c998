#!/usr/bin/env bash
# End the run in order, with a checkpoint.
USAGE='stop.sh --name NAME --zone ZONE [--wait SECONDS] [--force]

End the run by SIGTERM, so that it commits a checkpoint, and wait for it.
  --wait SECONDS       how long to wait for its end (300)
  --force              kill it if it has not ended by then; what came after the last checkpoint is lost'
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_settings "$@"
wait_s=300 force=0
set -- ${REST[@]+"${REST[@]}"}
while [ $# -gt 0 ]; do
  case "$1" in
    --wait) value_of "$1" $#; wait_s="$2"; shift 2 ;;
    --force) force=1; shift ;;
    *) die "unknown argument '$1'; see --help" 2 ;;
  esac
done
[[ "$wait_s" =~ ^[0-9]+$ ]] || die "--wait must be whole seconds, got '$wait_s'" 2
need_gcloud
set_where
need_vm
code=0
on_workers 0 "cd $(remote_dir) && test -f launch.pid || exit 3
pid=\$(cat launch.pid); kill -TERM \"\$pid\" 2>/dev/null || exit 3
for _ in \$(seq $wait_s); do kill -0 \"\$pid\" 2>/dev/null || exit 0; sleep 1; done
[ $force -eq 1 ] || exit 4
kill -KILL \"\$pid\"" || code=$?
case "$code" in
  0) say "the run has ended" ;;
  3) die "no run is going on there" 3 ;;
  4) die "the run has not ended within $wait_s s; wait longer with --wait, or kill it with --force" 4 ;;
  *) die "the run could not be stopped (ssh gave $code)" ;;
esac
