//! Linux's initiator, with nvme-cli, at the front-end for other hosts: all in one guest. The daemon
//! is in its sandbox.
//!
//! `VNVME_HOST_LONG` set: more kinds of hosts, longer loads, and a daemon that is killed.

use crate::common::{Checks, LONG_TIMEOUT};
use anyhow::{Result, ensure};
use harness::Guest;
use harness::daemon::program;
use harness::progress::{say, skip};
use harness::served::Controller;

/// What scripts need that have Linux's initiator at a daemon in the same guest: `serve ARGS`,
/// `end`, and `disk_of NQN [NSID]`: Linux looks at namespaces side by side, and numbers its disks
/// as it finds them.
const HOST_LIB: &str = r#"
export LD_LIBRARY_PATH=/tools/lib:/tmp
wait_for() { for try in $(seq 600); do eval "$1" && return 0; sleep 0.05; done; echo "never: $1" >&2; return 1; }
serve() {
    rm -f /tmp/pid /tmp/status
    {
        /tmp/vnvme serve "$@" >/tmp/log 2>&1 &
        echo $! >/tmp/pid; wait $! && s=0 || s=$?; echo $s >/tmp/status
    } &
    wait_for '[ -s /tmp/pid ]'
    wait_for "grep -q 'listening for NVMe over TCP' /tmp/log || ! kill -0 $(cat /tmp/pid) 2>/dev/null"
    grep -q 'listening for NVMe over TCP' /tmp/log || { cat /tmp/log >&2; return 1; }
}
end() {
    kill -TERM $(cat /tmp/pid)
    wait_for '[ -s /tmp/status ]'
    [ $(cat /tmp/status) = 0 ] || { cat /tmp/status /tmp/log >&2; return 1; }
}
disk_of() {
    for try in $(seq 300); do
        for s in /sys/class/nvme-subsystem/*; do
            [ -e $s/subsysnqn ] && [ "$(cat $s/subsysnqn)" = "$1" ] || continue
            for d in $(ls $s | grep -E '^nvme[0-9]+n[0-9]+$'); do
                [ "$(cat $s/$d/nsid)" = ${2:-1} ] && [ -b /dev/$d ] && echo /dev/$d && return 0
            done
        done
        sleep 0.1
    done
    echo "no disk of $*" >&2; return 1
}
verify() { fio --name=v --filename=$1 --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-512k --size=${2:-24m} \
    --iodepth=16 --verify=crc32c --verify_fatal=1 --verify_state_save=0 >/tmp/fio 2>&1 || { cat /tmp/fio; return 1; }; }
A=127.0.0.1; N=nqn.2014-08.org.vnvme:served
# What a check that failed has left.
[ ! -s /tmp/pid ] || [ -s /tmp/status ] || {
    nvme disconnect-all; kill -KILL $(cat /tmp/pid); wait_for '[ -s /tmp/status ]'
}
"#;

/// Runs a script that must succeed in a guest, with [`HOST_LIB`].
pub fn host(guest: &Guest, script: &str) -> Result<String> {
    guest.run_for(LONG_TIMEOUT, &format!("{HOST_LIB}\nset -e\n{script}"))
}

/// All that one host is asked for, so that it is booted once.
#[test]
fn linux_host_uses_nvme_tcp_target() -> Result<()> {
    if Controller::chosen()? != Controller::Vnvme {
        skip("nvme-tcp::host", "the tests run against QEMU's controller");
        return Ok(());
    }
    let long = std::env::var_os("VNVME_HOST_LONG").is_some();
    let guest = Guest::builder("nvme-host")
        .memory_mib(1024)
        .programs(&[program()?])
        .boot()?;
    guest.run("modprobe nvme-tcp; ip link set lo up")?;
    let mut checks = Checks::new("nvme-tcp-host");
    checks.check("discover and connect-all", || discovers(&guest));
    checks.check("reset and disconnect under load", || resets(&guest, long));
    checks.check("DH-HMAC-CHAP", || proves(&guest));
    if long {
        checks.check("digests, queues, block sizes", || kinds_of_hosts(&guest));
        checks.check("the daemon is killed", || daemon_killed(&guest));
    }
    checks.finish();
    Ok(())
}

fn discovers(guest: &Guest) -> Result<()> {
    let said = host(
        guest,
        "truncate -s 64M /tmp/disk.raw
         cat >/tmp/vnvme.toml <<X
[[nvme-tcp]]
listen = \"127.0.0.1:4420\"
subnqn = \"$N\"
serial = \"FAR\"
model = \"a far disk\"
[[nvme-tcp.namespace]]
volume = \"/tmp/disk.raw\"
[[nvme-tcp.namespace]]
volume = \"mem://16M\"
block-size = 4096
X
         serve --config /tmp/vnvme.toml
         nvme discover -t tcp -a $A -s 4420 | tee /tmp/discovered
         grep -q \"subnqn: *$N\" /tmp/discovered
         nvme connect-all -t tcp -a $A -s 4420
         d=$(disk_of $N)
         c=/dev/$(ls -d /sys/class/nvme/nvme* | head -n 1 | sed 's:.*/::')
         nvme id-ctrl $c | tee /tmp/id | grep -q 'a far disk'
         grep -q 'sn *: FAR' /tmp/id
         nvme list-ns $c | tee /tmp/ns
         head /sys/class/nvme-subsystem/*/nvme*n*/nsid
         [ $(grep -c ':0x' /tmp/ns) = 2 ]
         [ $(blockdev --getsize64 $d) = $((64 << 20)) ]
         [ $(blockdev --getss $(disk_of $N 2)) = 4096 ]
         nvme ana-log $c >/dev/null
         nvme smart-log $c >/dev/null
         nvme error-log $c >/dev/null
         nvme effects-log $c >/dev/null
         nvme get-feature $c -f 7 >/dev/null
         nvme get-feature $c -f 0xf
         verify $d 12m
         mkfs.ext4 -q $d; mkdir -p /tmp/m; mount $d /tmp/m; cp -r /bin /tmp/m/; umount /tmp/m
         e2fsck -fn $d >/dev/null
         blkdiscard $d; cmp -n $((64 << 20)) $d /dev/zero
         # The file grows: the host sees it.
         truncate -s 80M /tmp/disk.raw
         wait_for \"[ \\$(blockdev --getsize64 $d) = $((80 << 20)) ]\"
         nvme disconnect-all
         end; cat /tmp/log",
    )?;
    ensure!(said.contains("sandbox: landlock"), "no sandbox:\n{said}");
    Ok(())
}

/// The daemon requires its hosts to authenticate, at an address that others reach; the host
/// requires the same of the daemon.
fn proves(guest: &Guest) -> Result<()> {
    let said = host(
        guest,
        "H=nqn.2014-08.org.vnvme:harness
         K=DHHC-1:01:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:
         C=DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:
         echo \"$H $K $C\" >/tmp/keys; chmod 600 /tmp/keys
         serve --nvme-tcp 0.0.0.0:4420 mem://64M --subnqn $N --host-keys /tmp/keys
         fails() { ! timeout 60 nvme connect -t tcp -a $A -s 4420 -n $N --ctrl-loss-tmo=1 \"$@\" 2>/dev/null || { echo \"connected: $*\"; return 1; }; }
         fails --hostnqn=$H
         fails --hostnqn=$H --dhchap-secret=$C
         fails --hostnqn=$H --dhchap-secret=$K --dhchap-ctrl-secret=$K
         fails --hostnqn=$H-other --dhchap-secret=$K
         [ -z \"$(ls /sys/class/nvme)\" ] || nvme disconnect-all
         for words in '' --dhchap-ctrl-secret=$C; do
             nvme connect -t tcp -a $A -s 4420 -n $N --hostnqn=$H --dhchap-secret=$K $words
             d=$(disk_of $N); c=/dev/$(ls -d /sys/class/nvme/nvme* | head -n 1 | sed 's:.*/::')
             verify $d 8m
             nvme reset $c
             verify $d 4m
             nvme disconnect -n $N
         done
         end
         grep -q 'authentication of a host failed' /tmp/log
         ! grep -E 'DHHC|AQIDBA|ia6zGo' /tmp/log
         echo proven",
    )?;
    ensure!(said.contains("proven"), "{said}");
    say("nvme-tcp: Linux's initiator proves who it is, both ways");
    Ok(())
}

fn kinds_of_hosts(guest: &Guest) -> Result<()> {
    host(
        guest,
        "for words in '' '--hdr-digest' '--data-digest' '--hdr-digest --data-digest' \\
                '--nr-io-queues=1 --queue-size=16' '--nr-io-queues=4 --queue-size=128'; do
             serve --nvme-tcp 127.0.0.1:4420 'mem://64M?block-size=4096' --subnqn $N --workers 2
             nvme connect -t tcp -a $A -s 4420 -n $N $words
             d=$(disk_of $N)
             verify $d || { echo \"with $words\"; cat /tmp/log; exit 1; }
             nvme disconnect -n $N
             end
             ! grep -E 'WARN|ERROR|breaks|digest' /tmp/log | grep -v 'CPUs'
         done",
    )
    .map(drop)
}

/// Resets, and a disconnect in the middle of a load, after which the disk can be connected again.
fn resets(guest: &Guest, long: bool) -> Result<()> {
    let size = if long { "48m" } else { "12m" };
    let script = "truncate -s 64M /tmp/disk2.raw
         serve --nvme-tcp 127.0.0.1:4420 /tmp/disk2.raw --subnqn $N --workers 2
         nvme connect -t tcp -a $A -s 4420 -n $N --data-digest
         d=$(disk_of $N); c=/dev/$(ls -d /sys/class/nvme/nvme* | head -n 1 | sed 's:.*/::')
         verify $d $SIZE & load=$!
         n=0
         while kill -0 $load 2>/dev/null; do nvme reset $c; n=$((n + 1)); sleep 0.7; done
         wait $load || { cat /tmp/fio /tmp/log; exit 1; }
         echo \"resets: $n\"
         fio --name=l --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bs=16k --iodepth=32 \\
             --time_based --runtime=20 >/dev/null 2>&1 & load=$!
         sleep 2
         nvme disconnect -n $N
         wait $load || true
         nvme connect -t tcp -a $A -s 4420 -n $N
         d=$(disk_of $N)
         verify $d 8m
         nvme disconnect -n $N
         end";
    let said = host(guest, &format!("SIZE={size}\n{script}"))?;
    say(format!("nvme-tcp: {}", said.trim()));
    Ok(())
}

/// The daemon is killed under load and started again: the host waits, connects again, and all is
/// there.
fn daemon_killed(guest: &Guest) -> Result<()> {
    let said = host(
        guest,
        "truncate -s 64M /tmp/disk3.raw
         S=\"--nvme-tcp 127.0.0.1:4420 /tmp/disk3.raw --subnqn $N\"
         serve $S
         nvme connect -t tcp -a $A -s 4420 -n $N --reconnect-delay=1 --keep-alive-tmo=5
         d=$(disk_of $N)
         verify $d 48m & load=$!
         n=0
         while kill -0 $load 2>/dev/null; do
             sleep 1.5
             kill -KILL $(cat /tmp/pid); wait_for '[ -s /tmp/status ]'
             serve $S
             n=$((n + 1))
             sleep 2.5
         done
         wait $load || { cat /tmp/fio /tmp/log; exit 1; }
         echo \"daemon killed: $n times\"
         nvme disconnect -n $N
         end",
    )?;
    say(format!("nvme-tcp: {}", said.trim()));
    Ok(())
}
