#!/usr/bin/env bash
# Copy the checkout to every worker.
USAGE='sync.sh --name NAME --zone ZONE [--with-models]

Copy this checkout to every worker. Left out: .git, .venv, runs, caches, environment files, and models unless asked for.
  --with-models        copy models/ too'
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

parse_settings "$@"
excluded=(./.git ./.venv ./runs ./build ./dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache __pycache__ '*.env' ./benchmarks/results)
with_models=0
for argument in ${REST[@]+"${REST[@]}"}; do
  [ "$argument" = --with-models ] || die "unknown argument '$argument'; see --help" 2
  with_models=1
done
[ "$with_models" -eq 1 ] || excluded+=(./models)
need_gcloud
set_where
need_vm
if [ "$DRY_RUN" -eq 0 ]; then
  folder="$(mktemp -d)"
  trap 'rm -rf "$folder"' EXIT
else
  folder=TEMPORARY_FOLDER
fi
run tar -czf "$folder/jaxrl.tar.gz" "${excluded[@]/#/--exclude=}" -C "$CHECKOUT" .
# The first ssh waits for a VM that still boots; scp alone would not.
on_workers all "mkdir -p $(remote_dir)"
run gcloud compute tpus tpu-vm scp "$folder/jaxrl.tar.gz" "$TPU_NAME:jaxrl.tar.gz" "${WHERE[@]}" --worker=all
on_workers all "tar -xzf jaxrl.tar.gz -C $(remote_dir) && rm jaxrl.tar.gz"
