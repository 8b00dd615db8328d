#!/bin/sh
# Makes sure that SAPIEN's simulators (ManiSkill, RoboTwin) can draw without a GPU: they need Vulkan, with a driver that
# offers descriptor indexing, which Mesa's software driver of Debian 12 (22.3) does not.
# Does nothing when a driver is there. Else installs Mesa's with apt as root; on Debian 12, takes the newer one of its
# backports and puts it into a separate folder, so that Mesa's GL stays what it was. Always exits 0.
set -u

FOLDER=${XDG_CACHE_HOME:-$HOME/.cache}/vla-rl/mesa # vla_rl looks here
OLDEST=24.3

mesa() { # mesa COMMAND...: is the version that the command prints new enough?
    version=$("$@" 2>/dev/null) && [ -n "$version" ] && dpkg --compare-versions "$version" ge "$OLDEST"
}

unpacked() {
    [ -f "$FOLDER/lvp_icd.json" ] && ! ldd "$FOLDER/libvulkan_lvp.so" 2>&1 | grep -q "not found"
}

loader() {
    (ldconfig -p || /sbin/ldconfig -p) 2>/dev/null | grep -q libvulkan.so.1
}

installed() {
    dpkg-query -W -f '${Version}' mesa-vulkan-drivers
}

ready() {
    [ -z "${VK_ICD_FILENAMES:-}${VK_DRIVER_FILES:-}" ] || return 0 # the user's choice
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; then return 0; fi
    loader && { unpacked || mesa installed; }
}

warn() {
    echo "install_vulkan: $1" >&2
    echo "install_vulkan: SAPIEN's simulators need the Vulkan driver of a GPU, or Mesa $OLDEST or newer:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y libvulkan1 mesa-vulkan-drivers" >&2
    exit 0
}

candidate() {
    apt-cache policy mesa-vulkan-drivers | awk '/Candidate:/ {print $2}'
}

absent() { # those of the packages named on standard input that are not installed
    while read -r package; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed" || echo "$package"
    done
}

private_apt() { # private_apt COMMAND...: apt-get with lists, cache and sources in $WORK; needs no rights
    command=$1
    shift
    apt-get -qq -o "Dir::State::lists=$WORK/lists" -o "Dir::Cache=$WORK/cache" -o "Dir::Etc::sourcelist=$WORK/list" \
        -o Dir::Etc::sourceparts=- -o "APT::Sandbox::User=$(id -un)" "$command" "$@" >/dev/null
}

unpack_backport() { # put the driver of bookworm-backports into $FOLDER; the mirror is that of this machine
    WORK=$(mktemp -d) || return 1
    trap 'rm -rf "$WORK"' EXIT
    mkdir -p "$WORK/lists/partial" "$WORK/cache/archives/partial" "$FOLDER" || return 1
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
        awk '$1 == "bookworm" {print $2; exit}')
    keys=/usr/share/keyrings/debian-archive-keyring.gpg
    [ -n "$mirror" ] && [ -f "$keys" ] || return 1
    echo "deb [signed-by=$keys] $mirror bookworm-backports main" >"$WORK/list"
    private_apt update && cd "$WORK" && private_apt download mesa-vulkan-drivers || return 1
    dpkg-deb -x mesa-vulkan-drivers_*.deb driver || return 1
    library=$(find driver -name libvulkan_lvp.so) && icd=$(find driver -name 'lvp_icd*.json') || return 1
    cp "$library" "$FOLDER/" || return 1
    sed "s#\"library_path\": *\"[^\"]*\"#\"library_path\": \"$FOLDER/libvulkan_lvp.so\"#" "$icd" >"$WORK/icd" || return 1
    # What it needs besides: any version will do, though the package asks for newer ones of libdrm.
    NEEDED=$(dpkg-deb -f mesa-vulkan-drivers_*.deb Depends | tr ',' '\n' | sed 's/^ *//; s/[ :].*//' | absent)
    mv "$WORK/icd" "$FOLDER/lvp_icd.json"
}

install() {
    # shellcheck disable=SC2086
    [ -z "$*" ] || apt-get install -y -qq --no-install-recommends $* >/dev/null
}

[ "$(uname -s)" = Linux ] || exit 0 # SAPIEN brings what it needs
ready && exit 0
command -v apt-get >/dev/null 2>&1 || warn "no Vulkan driver known here, and no apt-get"
export DEBIAN_FRONTEND=noninteractive
ROOT=$([ "$(id -u)" = 0 ] && echo yes || echo no)
if [ "$ROOT" = yes ]; then
    echo "install_vulkan: installing a Vulkan driver"
    apt-get update -qq || warn "apt-get update failed"
fi
if mesa candidate; then
    [ "$ROOT" = yes ] || warn "a Vulkan driver is missing and only root can install it"
    install libvulkan1 mesa-vulkan-drivers || warn "apt-get install failed"
elif grep -q "^VERSION_CODENAME=bookworm" /etc/os-release; then
    unpacked || unpack_backport || warn "could not get mesa-vulkan-drivers from bookworm-backports"
    NEEDED=${NEEDED:-$(echo libvulkan1 | absent)}
    if [ "$ROOT" = yes ]; then
        install "$NEEDED" || warn "apt-get install failed:$NEEDED"
    elif ! ready; then
        echo "install_vulkan: the driver is in $FOLDER; root has to add what it needs:" >&2
        echo "    sudo apt-get install -y --no-install-recommends $(echo $NEEDED)" >&2
        exit 0
    fi
else
    warn "this release offers Mesa $(candidate)"
fi
ready || warn "still no Vulkan driver that can draw"
echo "install_vulkan: done"
