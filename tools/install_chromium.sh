#!/bin/sh
# Makes sure that the tests of the page for a robot's person have a browser (VLA_RL_CHROMIUM, or one on the PATH).
# Does nothing when there is one; installs Chromium with apt as root; else prints the command. Always exits 0.
set -u

ready() {
    [ -n "${VLA_RL_CHROMIUM:-}" ] || command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1
}

warn() {
    echo "install_chromium: $1; without a browser its tests are skipped" >&2
    echo "install_chromium: to run them: sudo apt-get install -y --no-install-recommends chromium, or VLA_RL_CHROMIUM=PATH" >&2
    exit 0
}

ready && exit 0
command -v apt-get >/dev/null 2>&1 || warn "there is no Chromium and no apt-get"
[ "$(id -u)" = 0 ] || warn "there is no Chromium and only root can install it"

echo "install_chromium: installing Chromium"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || warn "apt-get update failed"
case "$(apt-cache policy chromium)" in # Ubuntu's package installs a snap, which containers have not
    *"Candidate: (none)"* | *snap* | "") warn "this release has no package of Chromium" ;;
esac
apt-get install -y -qq --no-install-recommends chromium >/dev/null || warn "apt-get install failed"
echo "install_chromium: done"
