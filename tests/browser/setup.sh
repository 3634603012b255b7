#!/bin/sh
# Debian's Chromium for the tests of the page (tests/compare/test_page.py), which skip themselves without one. As root.
set -eu
command -v chromium >/dev/null && exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq install -y --no-install-recommends chromium fonts-liberation >/dev/null
