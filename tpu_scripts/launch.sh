#!/usr/bin/env bash
# Start a training run in the background of the TPU VM.
USAGE='launch.sh --name NAME --zone ZONE [--env-file FILE] -- ARGUMENTS OF python -m jaxrl.train

Start a run in the background of the TPU VM; its output goes to launch.log, its process id to launch.pid. Refused while one runs.
  --env-file FILE      lines NAME=VALUE for the run, such as WANDB_API_KEY; mode 600; never printed
Example: launch.sh --name my-tpu --zone us-west4-a -- --config configs/quickstart.toml --run.name first'
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_settings "$@"
env_file=
set -- ${REST[@]+"${REST[@]}"}
while [ $# -gt 0 ]; do
  case "$1" in
    --env-file) value_of "$1" $#; env_file="$2"; shift 2 ;;
    --) shift; break ;;
    *) die "unknown argument '$1'; arguments of the run stand after --" 2 ;;
  esac
done
[ $# -gt 0 ] || die "nothing to run: name the configuration after --, such as -- --config configs/quickstart.toml" 2
if [ -n "$env_file" ]; then
  [ -f "$env_file" ] || die "no such file: --env-file '$env_file'" 2
  case "$(stat -c %a "$env_file" 2>/dev/null || stat -f %Lp "$env_file")" in
    600 | 400) ;;
    *) die "'$env_file' can be read by others; run: chmod 600 '$env_file'" 2 ;;
  esac
fi
need_gcloud
set_where
need_vm
if [ "$DRY_RUN" -eq 0 ]; then
  hosts="$(vm_field 'networkEndpoints[].ipAddress')"
  case "$hosts" in
    *\;* | *,*) die "'$TPU_NAME' has more than one host ($hosts). The embedded engine lives in one process, so a run uses one host (jax.process_count() > 1 is a config error); take a single-host type such as v5litepod-8 or v6e-8" ;;
  esac
fi
in_dir="cd $(remote_dir)"
source_env=
if [ -n "$env_file" ]; then
  on_workers 0 "umask 077 && $in_dir && : > launch.env && chmod 600 launch.env"
  run gcloud compute tpus tpu-vm scp "$env_file" "$TPU_NAME:$TPU_REMOTE_DIR/launch.env" "${WHERE[@]}" --worker=0
  source_env='set -a; . ./launch.env; set +a; '
fi
arguments="$(printf ' %q' "$@")"
code=0
on_workers 0 "$in_dir || exit 5
if [ -f launch.pid ] && kill -0 \"\$(cat launch.pid)\" 2>/dev/null; then exit 3; fi
test -x .venv/bin/python || exit 6
${source_env}nohup .venv/bin/python -m jaxrl.train$arguments >> launch.log 2>&1 < /dev/null &
echo \$! > launch.pid" || code=$?
case "$code" in
  0) ;;
  3) die "a run is going on there; see it with watch.sh, end it with stop.sh" 3 ;;
  5) die "no checkout in '$TPU_REMOTE_DIR'; run sync.sh first" ;;
  6) die "no .venv in '$TPU_REMOTE_DIR'; run setup.sh first" ;;
  *) die "the run was not started (ssh gave $code)" ;;
esac
say "next: watch.sh"
