#!/bin/sh
# Builds what a release uploads and tries it; `make release` runs it with an interpreter that has the `dev` extra and twine.
# CHANGELOG.md gets the files of changes/, dist/ the sdist and the wheel. Each of the two is installed in an empty
# environment, build/release-*, where the first steps of the quickstart run; it stays only where something fails.
set -eu
unset PYTHONPATH

PYTHON=$1
TORCH=$(grep '^torch==' constraints.txt)
VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/vla_rl/version.py)
SDIST=dist/vla_rl-$VERSION.tar.gz
WHEEL=dist/vla_rl-$VERSION-py3-none-any.whl
HERE=$PWD

fail() {
    echo "release: $1" >&2
    exit 1
}

has_version() { # CHANGELOG.md has a section for VERSION
    grep -qF "## [$VERSION] - " CHANGELOG.md
}

write_changelog() { # move the files of changes/ into CHANGELOG.md
    if ls changes/+* >/dev/null 2>&1; then
        has_version && fail "CHANGELOG.md has $VERSION already, and changes/ has more: raise src/vla_rl/version.py"
        "$PYTHON" -m towncrier build --yes --version "$VERSION"
    fi
    has_version || fail "CHANGELOG.md has no section for $VERSION, and changes/ has nothing to put there"
}

test_sdist() { # run the tests of the repository as such on what the sdist holds
    rm -rf build/release-source
    mkdir -p build/release-source
    tar -xzf "$SDIST" -C build/release-source --strip-components 1
    (cd build/release-source && PYTHONPATH=src "$PYTHON" -m pytest -q -p no:cacheprovider tests/test_*.py)
    rm -rf build/release-source
}

try_installed() { # try_installed NAME FILE: install a distribution in build/release-NAME and take the first steps there
    environment=$HERE/build/release-$1
    echo "release: installing $2 into $environment: minutes, in silence"
    rm -rf "$environment"
    "$PYTHON" -m venv "$environment"
    "$environment/bin/python" -m pip install -q "$TORCH" # first, so that its build is settled, as in the Makefile
    "$environment/bin/python" -m pip install -q -c constraints.txt "$HERE/$2[openvla]"
    cd "$environment"
    installed=$(bin/vla-rl --version)
    [ "$installed" = "$VERSION" ] || fail "$2 installed version $installed"
    conflicts=$(bin/python -m pip check | grep '^vla-rl ' || true)
    [ -z "$conflicts" ] || fail "pip check: $conflicts"
    bin/vla-rl doctor
    bin/vla-rl run tabletop_grpo --folder run runtime.backend=local train.steps=2 eval.every=2 eval.episodes_per_task=4 \
        env.num_envs=32 rollout.episodes=64
    [ -f run/results.json ] || fail "the run of $2 left no results.json"
    cd "$HERE"
    rm -rf "$environment"
}

[ -n "$VERSION" ] || fail "src/vla_rl/version.py names no version"
write_changelog
rm -f "$SDIST" "$WHEEL"
"$PYTHON" -m build --no-isolation
"$PYTHON" -m twine check "$SDIST" "$WHEEL"
test_sdist
try_installed sdist "$SDIST"
try_installed wheel "$WHEEL"

cat <<END

release: dist/ has $VERSION, built and tried. What is left to a person:
  git add -A && git commit -m "release: $VERSION" && git tag -a v$VERSION -m "vla-rl $VERSION" && git push --follow-tags
  $PYTHON -m twine upload $SDIST $WHEEL
  once the index has it: PUBLISHED = True in src/vla_rl/core/installation.py, and tests/core/test_installation.py
  lists the pages whose install command changes with it
END
