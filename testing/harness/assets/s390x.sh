#!/bin/busybox sh
# The first program of the s390x guest: makes busybox's links and unpacks the modules, which the harness could not do for
# another architecture, then goes on as every guest does.
/bin/busybox --install -s /bin
for module in /boot/*/*.ko.xz; do [ ! -e "$module" ] || /bin/busybox xz -d "$module"; done
exec /bin/busybox sh /init.sh
