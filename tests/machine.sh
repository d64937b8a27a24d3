# shellcheck shell=bash
# Sourced by run.sh and images/ensure.sh. Everything said here goes to stderr:
# stdout belongs to the caller.

AS_ROOT=()
[ "$(id -u)" -eq 0 ] || AS_ROOT=(sudo --)

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

note() {
    printf '%s\n' "$*" >&2
}

can_be_root() {
    [ "$(id -u)" -eq 0 ] || command -v sudo >/dev/null
}

as_root() {
    "${AS_ROOT[@]}" "$@"
}

# Silent unless it fails: an engine alone is a page of unpacking and setting up.
apt_get() {
    local said
    # A fresh machine often still runs its first unattended upgrade: wait for it.
    said=$(as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 "$@" 2>&1) ||
        { note "$said"; return 1; }
}

# One broken source among others is no reason to stop: what is needed may well
# be in the rest.
apt_update() {
    apt_get update || note "some package lists could not be read"
}

# apt_install REASON PACKAGE...
apt_install() {
    local reason=$1
    shift
    command -v apt-get >/dev/null ||
        die "$reason, and there is no apt-get here to install it with: install $* by hand"
    can_be_root ||
        die "$reason: run this as root or with sudo at hand, or install $* by hand"
    note "installing $*"
    apt_update
    apt_get install -y --no-remove --no-install-recommends "$@" ||
        die "$reason, and apt-get could not install $*: see its messages above"
}
