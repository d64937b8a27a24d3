#!/usr/bin/env bash
# Makes sure of the images that the tests start, and prints one line
# VARIABLE=image for each. An image that the variable already names is used as
# it is. Otherwise the official one is taken, from this machine or from a
# registry; where there is no registry, its stand-in is built from Debian
# packages, fetched from the mirror that this machine already uses.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=tests/machine.sh
. "$here/../machine.sh"

# Long enough for an official image on a slow line, short enough to leave most
# of the time for the tests where packets to the registry just vanish.
PULL_SECONDS=120
# A bootstrap takes half a minute; a mirror that hangs takes for ever.
BOOTSTRAP_SECONDS=300

scratch=
bootstrapping=
# Asking again for the next image would only wait again.
registry=unknown

cleanup() {
    [ -n "$scratch" ] || return 0
    if [ -n "$bootstrapping" ]; then
        as_root kill "$bootstrapping" || true
        wait "$bootstrapping" || true
    fi
    # An interrupted debootstrap can leave /proc, or the host's own devices,
    # mounted inside the tree: nothing below may reach through them.
    local mounted
    for mounted in proc sys dev; do
        as_root umount --recursive --quiet "$scratch/root/$mounted" 2>/dev/null || true
    done
    as_root rm -rf --one-file-system "$scratch"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

present() {
    docker image inspect "$1" >/dev/null 2>&1
}

pull() {
    note "pulling $1"
    timeout --foreground "$PULL_SECONDS" docker pull --quiet "$1" >&2
}

# The mirror of the distribution itself, not of its security updates, as apt
# understands it: one-line and deb822 sources alike. Empty when there is none
# that debootstrap could use.
debian_mirror() {
    command -v apt-get >/dev/null || return 0
    # shellcheck disable=SC2016 # apt's own placeholders
    apt-get indextargets --format '$(LABEL) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk '$1 == "Debian" && $2 == "main" && $3 ~ /^https?:/ && !seen++ { print $3 }'
}

# base SUITE: a minimal Debian as fencerow-test/debian:SUITE, shared by the
# images built on it.
base() {
    local suite=$1 tag=fencerow-test/debian:$1 mirror id
    if present "$tag"; then
        return 0
    fi
    PATH=$PATH:/usr/sbin command -v debootstrap >/dev/null ||
        apt_install "debootstrap is needed to build the test images" debootstrap debian-archive-keyring
    can_be_root ||
        die "debootstrap needs root to build the test images: run this as root or with sudo at hand, or set the image variables"
    mirror=$(debian_mirror)
    if [ -z "$mirror" ] && command -v apt-get >/dev/null && can_be_root; then
        # The lists may have been cleaned away, and apt answers from them.
        apt_update
        mirror=$(debian_mirror)
    fi

    # Not /tmp, which Debian 13 mounts nodev.
    scratch=$(mktemp -d -p /var/tmp fencerow-images.XXXXXX)
    bootstrap "$suite" "$mirror" ||
        { [ -n "$mirror" ] && note "trying debootstrap's own mirror" && bootstrap "$suite" ""; } ||
        die "no Debian $suite could be fetched to build the test images from: check this machine's apt sources and network, or set the image variables"

    note "importing $tag"
    # No service may start while packages are installed: on the host's network
    # it would take the host's ports.
    printf '#!/bin/sh\nexit 101\n' | as_root tee "$scratch/root/usr/sbin/policy-rc.d" >/dev/null
    as_root chmod +x "$scratch/root/usr/sbin/policy-rc.d"
    # A half-built image is thrown away, so dpkg need not sync each file.
    printf '%s\n' force-unsafe-io 'path-exclude /usr/share/doc/*' 'path-exclude /usr/share/man/*' \
        'path-exclude /usr/share/locale/*' |
        as_root tee "$scratch/root/etc/dpkg/dpkg.cfg.d/small" >/dev/null
    id=$(as_root tar -C "$scratch/root" --one-file-system \
        --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' \
        --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*' \
        -c . | docker import -) || die "the base of the test images could not be imported into Docker"
    # Only now, so that a cut-off import is not taken for the base next time.
    docker tag "$id" "$tag"
    cleanup
    scratch=
}

# bootstrap SUITE MIRROR
bootstrap() {
    local -a mirror=()
    [ -z "$2" ] || mirror=("$2")
    local include=
    case $2 in
        https:*) include=--include=ca-certificates ;;
    esac
    as_root rm -rf --one-file-system "$scratch/root"
    note "fetching Debian $1"
    # In the background, so that a signal here need not wait for its end; under
    # timeout, which passes the signal on to all that debootstrap has started.
    "${AS_ROOT[@]}" timeout "$BOOTSTRAP_SECONDS" debootstrap --variant=minbase ${include:+"$include"} \
        "$1" "$scratch/root" "${mirror[@]}" >"$scratch/log" 2>&1 &
    bootstrapping=$!
    local status=0
    wait "$bootstrapping" || status=$?
    bootstrapping=
    [ "$status" -eq 0 ] || tail -n 5 "$scratch/log" >&2
    return "$status"
}

# build TAG DIRECTORY SUITE VERSION
build() {
    base "$3"
    note "building $1"
    local proxy='' said
    if command -v apt-config >/dev/null; then
        eval "$(apt-config shell proxy Acquire::http::Proxy)"
    fi
    # The classic builder, because it looks for the base in this engine's own
    # store; the host's network, because only that is known to reach the mirror.
    said=$(DOCKER_BUILDKIT=0 docker build --network host --tag "$1" \
        ${proxy:+--build-arg "http_proxy=$proxy"} \
        --build-arg "SUITE=$3" --build-arg "VERSION=$4" "$here/$2" 2>&1) ||
        { note "$said"; die "the test image $1 could not be built: see the messages above"; }
}

# image VARIABLE OFFICIAL SUITE: OFFICIAL is NAME:VERSION, its stand-in is built
# from the directory NAME on Debian SUITE.
image() {
    local variable=$1 official=$2 suite=$3
    local own=fencerow-test/$official chosen=${!1:-}
    if [ -n "$chosen" ]; then
        present "$chosen" || pull "$chosen" ||
            die "$variable names $chosen, which is not on this machine and could not be pulled"
    elif present "$official"; then
        chosen=$official
    elif ! present "$own" && [ "$registry" != absent ] && pull "$official"; then
        chosen=$official
    else
        registry=absent
        # Also when it is there already: unless its directory changed, every
        # step comes from the cache.
        build "$own" "${official%%:*}" "$suite" "${official##*:}"
        chosen=$own
    fi
    printf '%s=%s\n' "$variable" "$chosen"
}

docker info >/dev/null 2>&1 ||
    die "no Docker engine answers: start one, or start from tests/run.sh, which does"

image FENCEROW_POSTGRES_IMAGE postgres:17 trixie
image FENCEROW_REDIS_IMAGE redis:8 trixie
# The oldest that are supported.
image FENCEROW_OLD_POSTGRES_IMAGE postgres:15 bookworm
image FENCEROW_OLD_REDIS_IMAGE redis:7 bookworm
