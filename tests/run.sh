#!/usr/bin/env bash
# Checks and tests everything, on a machine that may be bare: finds or starts a
# Docker engine, sees to a C compiler and to the images of the servers, and ends
# with the tests, whose summary is the last thing printed.
#
# FENCEROW_POSTGRES_IMAGE and FENCEROW_REDIS_IMAGE may name other images, and so
# may FENCEROW_OLD_POSTGRES_IMAGE and FENCEROW_OLD_REDIS_IMAGE for the oldest
# servers that are supported.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=tests/machine.sh
. tests/machine.sh

LABEL=org.fencerow.test
ENGINE_SECONDS=30

need_rust() {
    local wanted found
    # A shell that is no login shell often lacks it.
    command -v cargo >/dev/null || PATH=$PATH:$HOME/.cargo/bin
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    if ! command -v cargo >/dev/null; then
        apt_install "cargo and rustc are missing" rustup
        rustup toolchain install stable --profile minimal --component rustfmt --component clippy >&2 ||
            die "rustup could not fetch Rust: install $wanted or newer by hand, with rustfmt and clippy"
        rustup default stable >&2
    fi
    found=$(rustc --version 2>/dev/null) ||
        die "rustc does not run: install Rust $wanted or newer with rustup, with rustfmt and clippy"
    found=${found#rustc }
    found=${found%%[ -]*}
    printf '%s\n' "$wanted" "$found" | sort --version-sort --check=quiet ||
        die "rustc is $found, and $wanted or newer is needed: run rustup update"
    { cargo fmt --version && cargo clippy --version; } >/dev/null 2>&1 ||
        die "rustfmt or clippy is missing: run rustup component add rustfmt clippy"
}

engine_answers() {
    timeout --foreground "$ENGINE_SECONDS" docker info >/dev/null 2>&1
}

# Whether the default socket is there, but not for this user.
engine_refuses() {
    [ -S /var/run/docker.sock ] && [ ! -w /var/run/docker.sock ]
}

engine_comes_up() {
    local _
    for _ in $(seq "$ENGINE_SECONDS"); do
        if engine_answers || engine_refuses; then
            return 0
        fi
        sleep 1
    done
    return 1
}

start_engine() {
    note "starting the Docker engine"
    if [ -d /run/systemd/system ]; then
        as_root systemctl start docker >&2 || true
        engine_comes_up ||
            die "the Docker engine does not start: see journalctl -u docker, or set DOCKER_HOST to another engine"
        return
    fi
    # Without an init system this may do nothing, or start an engine that dies.
    if [ -x /etc/init.d/docker ] && as_root service docker start >&2 && engine_comes_up; then
        return
    fi
    local log=/var/log/fencerow-dockerd.log
    as_root sh -c "setsid dockerd </dev/null >$log 2>&1 &"
    engine_comes_up ||
        die "the Docker engine does not start: see $log, or set DOCKER_HOST to another engine"
}

# Starts this script anew as the same user, in the socket's group as well: a
# user who may become root need not join that group for good.
join_engine() {
    local group
    group=$(stat --format %g /var/run/docker.sock)
    case " $(id -G) " in
        *" $group "*) false ;;
        *) can_be_root ;;
    esac ||
        die "the Docker engine does not admit $(id -un): join the group of /var/run/docker.sock and log in again, or run this as root"
    exec sudo --preserve-env -- setpriv --reuid "$(id -u)" --regid "$(id -g)" \
        --groups "$(id -G | tr ' ' ,),$group" -- env "PATH=$PATH" "HOME=$HOME" tests/run.sh
}

need_engine() {
    if command -v docker >/dev/null && engine_answers; then
        return
    fi
    [ -z "${DOCKER_HOST:-}" ] ||
        die "no Docker engine answers at DOCKER_HOST, $DOCKER_HOST: start it, or unset DOCKER_HOST"
    # An engine's own directory for programs is not on every user's PATH.
    if ! PATH=$PATH:/usr/sbin command -v dockerd >/dev/null; then
        # Without its recommended packages, save the one that a registry needs.
        apt_install "there is no Docker engine" docker.io ca-certificates
    fi
    # Debian 13 keeps the command in a package of its own.
    command -v docker >/dev/null || apt_install "there is no docker command" docker-cli
    if ! engine_answers && ! engine_refuses; then
        can_be_root || die "the Docker engine is not running: start it, or run this as root or with sudo at hand"
        start_engine
    fi
    engine_answers || join_engine
}

need_compiler() {
    command -v cc >/dev/null ||
        apt_install "there is no C compiler and linker (cc)" gcc libc6-dev
}

need_images() {
    local images line
    images=$(tests/images/ensure.sh)
    while IFS= read -r line; do
        export "${line?}"
    done <<<"$images"
}

# Every test process removes its own, however it ends. What is left over is from before this
# machine was last shut down; other runs may be going on beside this one.
remove_leftovers() {
    local ids
    ids=$(docker ps --all --quiet --filter "label=$LABEL" \
        --filter status=exited --filter status=created --filter status=dead)
    # shellcheck disable=SC2086 # one word for each container
    [ -z "$ids" ] || docker rm --force --volumes $ids >/dev/null
}

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

# The page of the module `lease` has a table of the laws that each lock service
# keeps: what this run has seen, and nothing else.
check_conformance() {
    local seen=target/conformance.md
    tests/conformance.sh <"$1" >"$seen"
    diff -u src/lease/conformance.md "$seen" >&2 ||
        die "the table of laws is not what this run has seen: cp $seen src/lease/conformance.md"
}

need_rust
need_engine
need_compiler
need_images
remove_leftovers

run cargo fmt --all --check
run cargo clippy --locked --all-targets --all-features -- -D warnings
# The library alone: the tests and examples switch features on by themselves.
run cargo clippy --locked --lib --no-default-features -- -D warnings
for feature in redis redis-tls postgres sqlite; do
    run cargo clippy --locked --lib --no-default-features --features "$feature" -- -D warnings
done
run env RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --all-features
# The examples in the documentation go first: cargo would put them last, and the
# last summary should be that of the tests against the servers.
run cargo test --locked --all-features --doc
# More at once than there are cores: most of the time they wait for a server.
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-4}
mkdir -p target
run env FENCEROW_POSTGRES_IMAGE="$FENCEROW_OLD_POSTGRES_IMAGE" FENCEROW_REDIS_IMAGE="$FENCEROW_OLD_REDIS_IMAGE" \
    cargo test --locked --all-features --test it | tee target/conformance.log
check_conformance target/conformance.log
run cargo test --locked --all-features --tests
