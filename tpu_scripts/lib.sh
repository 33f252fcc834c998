# shellcheck shell=bash
# What every script here shares: settings from flags and environment, gcloud calls that can be shown instead of made, ssh with patience.
# Sourced, never run. A script sets USAGE, calls parse_settings "$@", and reads what is left from REST, spelled so that an empty one is no
# error in the bash 3.2 of macOS.

set -euo pipefail

TPU_NAME="${JAXRL_TPU_NAME:-}"
TPU_ZONE="${JAXRL_TPU_ZONE:-}"
TPU_PROJECT="${JAXRL_TPU_PROJECT:-}"
TPU_REMOTE_DIR="${JAXRL_TPU_REMOTE_DIR:-jaxrl}"
TPU_DEADLINE_S="${JAXRL_TPU_DEADLINE_S:-}"
TPU_POLL_S="${JAXRL_TPU_POLL_S:-10}"
DRY_RUN=0
REST=()

common_usage() {
  cat <<'TEXT'
Settings of every script (flag, or environment variable):
  --name NAME          JAXRL_TPU_NAME        name of the TPU VM (required)
  --zone ZONE          JAXRL_TPU_ZONE        its zone, such as us-west4-a (required)
  --project PROJECT    JAXRL_TPU_PROJECT     its project; otherwise that of `gcloud config`
  --remote-dir DIR     JAXRL_TPU_REMOTE_DIR  checkout on the VM, under the home folder (jaxrl)
  --deadline SECONDS   JAXRL_TPU_DEADLINE_S  longest wait for the VM, in whole seconds (900; create.sh --queued: 86400)
  --poll SECONDS       JAXRL_TPU_POLL_S      pause between two looks (10)
  --dry-run            print every command, quoted, and run nothing
  --help               this text
TEXT
}

die() {
  printf '%s: %s\n' "$(basename "$0")" "$1" >&2
  exit "${2:-1}"
}

say() { printf '%s\n' "$*" >&2; }

# value_of FLAG COUNT: refuse a flag that came without its value.
value_of() { [ "$2" -ge 2 ] || die "$1 needs a value; see --help" 2; }

parse_settings() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --name) value_of "$1" $#; TPU_NAME="$2"; shift 2 ;;
      --zone) value_of "$1" $#; TPU_ZONE="$2"; shift 2 ;;
      --project) value_of "$1" $#; TPU_PROJECT="$2"; shift 2 ;;
      --remote-dir) value_of "$1" $#; TPU_REMOTE_DIR="$2"; shift 2 ;;
      --deadline) value_of "$1" $#; TPU_DEADLINE_S="$2"; shift 2 ;;
      --poll) value_of "$1" $#; TPU_POLL_S="$2"; shift 2 ;;
      --dry-run) DRY_RUN=1; shift ;;
      --help | -h) printf '%s\n\n' "$USAGE"; common_usage; exit 0 ;;
      --) shift; REST+=(-- "$@"); break ;;
      *) REST+=("$1"); shift ;;
    esac
  done
  [ -n "$TPU_NAME" ] || die "no name: pass --name NAME or set JAXRL_TPU_NAME" 2
  [ -n "$TPU_ZONE" ] || die "no zone: pass --zone ZONE or set JAXRL_TPU_ZONE" 2
  # shellcheck disable=SC2034  # read by create.sh
  DEADLINE_IS_GIVEN="${TPU_DEADLINE_S:+1}"
  TPU_DEADLINE_S="${TPU_DEADLINE_S:-900}"
  [[ "$TPU_DEADLINE_S" =~ ^[0-9]+$ ]] || die "--deadline must be whole seconds, got '$TPU_DEADLINE_S'" 2
}

# Print a command so that a shell would read it back as the same words.
show() {
  printf '+'
  printf ' %q' "$@"
  printf '\n'
}

# run COMMAND...: show it, and run it unless this is a dry run.
run() {
  show "$@"
  [ "$DRY_RUN" -eq 1 ] || "$@"
}

# Refuse before anything is started if gcloud cannot work. A dry run needs none of it.
need_gcloud() {
  [ "$DRY_RUN" -eq 0 ] || return 0
  command -v gcloud >/dev/null || die "gcloud is not on PATH; install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install)"
  [ -n "$(gcloud auth list --filter=status:ACTIVE '--format=value(account)' 2>/dev/null)" ] ||
    die "gcloud is not logged in; run: gcloud auth login"
  if [ -z "$TPU_PROJECT" ]; then
    TPU_PROJECT="$(gcloud config get-value project 2>/dev/null || true)"
    if [ -z "$TPU_PROJECT" ] || [ "$TPU_PROJECT" = "(unset)" ]; then
      die "no project: pass --project PROJECT, or run: gcloud config set project PROJECT"
    fi
  fi
}

# Set WHERE to the flags that say where the VM is.
set_where() {
  WHERE=("--zone=$TPU_ZONE")
  [ -z "$TPU_PROJECT" ] || WHERE+=("--project=$TPU_PROJECT")
}

# described KIND FORMAT: a field of the description of the tpu-vm or queued-resources of that name; empty if there is none, and an error if
# gcloud fails for another reason.
described() {
  local answer
  if answer="$(gcloud compute tpus "$1" describe "$TPU_NAME" "${WHERE[@]}" "--format=value($2)" 2>&1)"; then
    printf '%s' "$answer"
  elif ! grep -qi 'not[ _]found' <<<"$answer"; then
    die "gcloud could not describe '$TPU_NAME': $answer"
  fi
}

vm_field() { described tpu-vm "$1"; }

# Refuse unless the VM is there and ready.
need_vm() {
  [ "$DRY_RUN" -eq 0 ] || return 0
  local state
  state="$(vm_field state)"
  case "$state" in
    READY) ;;
    '') die "no TPU VM '$TPU_NAME' in zone $TPU_ZONE of project $TPU_PROJECT; make it with create.sh, or correct --name and --zone" ;;
    PREEMPTED | TERMINATED) die "TPU VM '$TPU_NAME' is $state; delete it with delete.sh, make it again with create.sh, and resume the run from a copy of its folder" ;;
    *) die "TPU VM '$TPU_NAME' is $state, not READY; wait, or look at it with: gcloud compute tpus tpu-vm describe" ;;
  esac
}

# on_workers WORKER COMMAND: run a command over ssh. 255 is ssh's own failure (the VM boots, a key spreads): try again until the deadline.
on_workers() {
  local code=0 until_s=$((SECONDS + TPU_DEADLINE_S))
  local call=(gcloud compute tpus tpu-vm ssh "$TPU_NAME" "${WHERE[@]}" "--worker=$1" "--command=$2")
  show "${call[@]}"
  [ "$DRY_RUN" -eq 0 ] || return 0
  while true; do
    code=0
    "${call[@]}" </dev/null || code=$?
    [ "$code" -eq 255 ] || return "$code"
    [ "$SECONDS" -lt "$until_s" ] || die "ssh to '$TPU_NAME' did not work within $TPU_DEADLINE_S s; look at: gcloud compute tpus tpu-vm describe"
    say "ssh to '$TPU_NAME' is not possible yet; trying again in $TPU_POLL_S s"
    sleep "$TPU_POLL_S"
  done
}

# remote_dir: the checkout's folder, quoted for the remote shell.
remote_dir() { printf '%q' "$TPU_REMOTE_DIR"; }

# shellcheck disable=SC2034  # read by the scripts that source this file
CHECKOUT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
trap 'say "interrupted; nothing more is started (what runs on the VM goes on)"; exit 130' INT
