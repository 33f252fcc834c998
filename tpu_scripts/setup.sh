#!/usr/bin/env bash
# Install Python and jaxrl[tpu] on every worker.
USAGE='setup.sh --name NAME --zone ZONE [--python PYTHON]

Install Python and jaxrl[tpu] into .venv of the synced checkout on every worker, and show the devices. Run sync.sh before.
  --python PYTHON      package of the Python to install, 3.11 or newer (python3.11)'
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_settings "$@"
python=python3.11
set -- ${REST[@]+"${REST[@]}"}
while [ $# -gt 0 ]; do
  case "$1" in
    --python) value_of "$1" $#; python="$2"; shift 2 ;;
    *) die "unknown argument '$1'; see --help" 2 ;;
  esac
done
[[ "$python" =~ ^python3\.[0-9]+$ ]] || die "--python must be like python3.11, got '$python'" 2
need_gcloud
set_where
need_vm
on_workers all "test -f $(remote_dir)/Makefile" || die "no checkout in '$TPU_REMOTE_DIR' on every worker; run sync.sh first"
on_workers all "{ command -v make >/dev/null && $python -c 'import ensurepip, venv' 2>/dev/null; } || { sudo apt-get update -q && sudo apt-get install -y -q make $python $python-venv; }"
on_workers all "cd $(remote_dir) && make setup EXTRAS=tpu PYTHONS=$python"
on_workers all "cd $(remote_dir) && .venv/bin/python -c 'import jax; print(jax.devices())'"
