//! Disks and namespaces that come and go while guests use their neighbours: `vnvme daemon`, by its
//! control socket.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::common::{Checks, Disks, LONG_TIMEOUT, run, run_for};
use anyhow::{Context, Result, ensure};
use harness::daemon::program;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Guest};
use serde_json::json;

/// The first controller is the neighbour's; the second one, and the export, change.
const BUSY: usize = 1;
const CHANGING: usize = 2;

/// A daemon of the test's, and the folder with all that is its.
struct Managed {
    disks: Disks,
    /// Directory of its sockets. The path is short, as paths of sockets must be.
    dir: tempfile::TempDir,
    daemon: Daemon,
}

impl Managed {
    fn start() -> Result<Managed> {
        let disks = Disks::new()?;
        let dir = tempfile::Builder::new().prefix("vnvme-").tempdir()?;
        for (name, mib) in [("busy.raw", 64), ("first.raw", 16), ("export.raw", 32)] {
            disks.sparse(name, mib)?;
        }
        let (files, sockets) = (disks.dir().display(), dir.path().display());
        let config = format!(
            "[process]\nworkers = 2\nspread = \"stir\"\ncontrol = \"{sockets}/control\"\n\
             allow = [\"{files}\", \"{sockets}\"]\n\
             [[controller]]\nsocket = \"{sockets}/busy\"\n\
             [[controller.namespace]]\nvolume = \"{files}/busy.raw\"\n\
             [[controller]]\nsocket = \"{sockets}/vm\"\n\
             [[controller.namespace]]\nvolume = \"{files}/first.raw\"\n\
             [[vhost-user-blk]]\nsocket = \"{sockets}/export\"\n\
             volume = \"{files}/export.raw?serial=EXPORT\"\n"
        );
        let file = dir.path().join("vnvme.toml");
        fs::write(&file, config)?;
        let daemon = Daemon::builder("manage").managed(&file, &dir.path().join("vm"));
        Ok(Managed {
            daemon: daemon.start()?,
            disks,
            dir,
        })
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self, name: &str) -> String {
        self.disks.dir().join(name).display().to_string()
    }

    fn command(&self, words: &[&str]) -> Result<Output> {
        let (verb, rest) = words.split_first().context("no verb")?;
        let mut command = Command::new(program()?);
        command
            .arg(verb)
            .arg("--control")
            .arg(self.socket("control"));
        Ok(command.args(rest).output()?)
    }

    /// What a command prints that must succeed.
    fn vnvme(&self, words: &[&str]) -> Result<String> {
        let output = self.command(words)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{words:?}: {said}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// One that must fail, with these words.
    fn refused(&self, words: &[&str], why: &str) -> Result<()> {
        let output = self.command(words)?;
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        ensure!(!output.status.success(), "{words:?} succeeded: {said}");
        ensure!(said.contains(why), "{words:?}: {said}");
        Ok(())
    }
}

/// Rounds of writes and their verification, until `/tmp/stop` is there: `/tmp/rounds` counts them,
/// `/tmp/end` says how it ended.
fn keep_busy(guest: &Guest) -> Result<()> {
    let script = format!(
        "d=$(wait_disk {BUSY} 1)
         (rounds=0; while [ ! -e /tmp/stop ]; do
             fio --name=busy --thinktime=2ms --filename=$d --ioengine=io_uring --direct=1 --rw=randrw \
                 --bsrange=4k-64k --iodepth=4 --size=2m --verify=crc32c --verify_fatal=1 \
                 --verify_state_save=0 >/tmp/busy 2>&1 || {{ echo failed >/tmp/end; exit; }}
             rounds=$((rounds + 1)); echo $rounds >/tmp/rounds
         done; echo well >/tmp/end) </dev/null >/dev/null 2>&1 &"
    );
    run(guest, &script)?;
    another_round(guest)
}

/// Waits until the neighbour has completed another round.
fn another_round(guest: &Guest) -> Result<()> {
    run_for(
        guest,
        LONG_TIMEOUT,
        "touch /tmp/rounds; was=$(cat /tmp/rounds)
         for try in $(seq 2000); do
             [ ! -e /tmp/end ] || { cat /tmp/end /tmp/busy; exit 1; }
             [ \"$(cat /tmp/rounds)\" -ge $((was + 1)) ] && exit 0; sleep 0.1
         done
         echo the neighbour does not go on; exit 1",
    )
    .map(drop)
}

/// Lines of the driver's about controllers that are reset, or do not answer; each reset tells of
/// its queues anew.
fn resets(guest: &Guest) -> Result<String> {
    run(
        guest,
        "of='reset|timeout|controller is down|Abort|read/poll queues'
         dmesg | grep -cE \"nvme.*($of)\" || true",
    )
}

#[test]
fn disks_are_added_and_removed_beside_busy_guest() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        skip(
            "disks_are_added_and_removed_beside_busy_guest",
            "it needs vnvme",
        );
        return Ok(());
    }
    let m = Managed::start()?;
    let chardev = format!("socket,id=v0,path={}", m.socket("export").display());
    let guest = Guest::builder("manage")
        .vfio_user(m.socket("busy"))
        .vfio_user(m.socket("vm"))
        .qemu_args(["-chardev", &chardev])
        .qemu_args(["-device", "vhost-user-blk-pci,id=export,chardev=v0"])
        .qemu_args(["-device", "pcie-root-port,id=slot1,chassis=1,slot=1"])
        .boot()?;
    let mut checks = Checks::new("manage");
    checks.check("the neighbour", || keep_busy(&guest));
    checks.check("a namespace comes, grows and goes", || {
        namespace(&m, &guest)
    });
    checks.check("a configuration that fails changes nothing", || {
        applied(&m, &guest)
    });
    checks.check("an export grows", || export_grows(&m, &guest));
    checks.check("an export comes and goes", || export(&m, &guest));
    checks.check("the neighbour was never kept", || {
        another_round(&guest)?;
        run_for(
            &guest,
            LONG_TIMEOUT,
            "touch /tmp/stop
             for try in $(seq 2000); do [ -e /tmp/end ] && break; sleep 0.1; done
             [ \"$(cat /tmp/end)\" = well ] || { cat /tmp/busy; exit 1; }",
        )
        .map(drop)
    });
    checks.check("power off and SIGTERM", || {
        guest.poweroff()?;
        m.daemon.terminate()
    });
    checks.finish();
    Ok(())
}

fn namespace(m: &Managed, guest: &Guest) -> Result<()> {
    let before = resets(guest)?;
    let file = m.disks.sparse("second.raw", 8)?;
    for turn in 0..2 {
        let file = file.display().to_string();
        m.vnvme(&["attach", "vm", &file, "nsid=2"])?;
        m.refused(&["attach", "vm", "mem://1M", "nsid=2"], "already")?;
        let disk = format!("d=$(wait_disk {CHANGING} 2); q=/sys/block/$(basename $d)");
        // Filled to its end, also of what it has been given meanwhile.
        let size = 8 + 4 * (turn + 1);
        let filled = run_for(
            guest,
            LONG_TIMEOUT,
            &format!(
                "{disk}; mib=$(($(cat $q/size) >> 11))
                 head -c $((mib << 20)) /dev/urandom >/tmp/r
                 dd if=/tmp/r of=$d bs=1M oflag=direct conv=fsync 2>/dev/null
                 cmp -n $((mib << 20)) /tmp/r $d; sha256sum </tmp/r; rm /tmp/r"
            ),
        )?;
        let found = Command::new("sha256sum").arg(&file).output()?;
        let found = String::from_utf8(found.stdout)?;
        ensure!(
            found.split_whitespace().next() == filled.split_whitespace().next(),
            "{filled}: {found}"
        );
        m.vnvme(&["resize", "vm", &format!("{size}M"), "--nsid", "2"])?;
        m.refused(&["resize", "vm", "1M", "--nsid", "2"], "cannot shrink")?;
        run(
            guest,
            &format!(
                "{disk}
                 for try in $(seq 300); do [ $(cat $q/size) = {blocks} ] && break; sleep 0.1; done
                 [ $(cat $q/size) = {blocks} ]
                 dd if=/dev/zero of=$d bs=1M seek={last} count=1 oflag=direct conv=fsync 2>/dev/null
                 mkfs.ext4 -q -F $d; mount $d /mnt; cp /bin/busybox /mnt/; umount /mnt
                 e2fsck -f -n $d",
                blocks = size << 11,
                last = size - 1
            ),
        )?;
        // While it is being written.
        run(
            guest,
            &format!(
                "{disk}; (dd if=/dev/zero of=$d bs=64k oflag=direct >/dev/null 2>&1) </dev/null &
                 for try in $(seq 300); do
                     set -- $(cat $q/stat); [ $9 -gt 0 ] && break; sleep 0.01
                 done"
            ),
        )?;
        m.vnvme(&["detach", "vm", "2"])?;
        m.refused(&["detach", "vm", "2"], "no namespace 2")?;
        run(
            guest,
            &format!(
                "for try in $(seq 300); do disk {CHANGING} 2 >/dev/null || exit 0; sleep 0.1; done
                 echo it is there still; exit 1"
            ),
        )?;
        let locks = fs::read_to_string("/proc/locks")?;
        let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(&file)?);
        ensure!(!locks.contains(&format!(":{inode} ")), "it is locked still");
    }
    let after = resets(guest)?;
    ensure!(before == after, "resets: {before} before, {after} after");
    run(guest, &format!("wait_disk {CHANGING} 1"))?;
    another_round(guest)
}

fn applied(m: &Managed, guest: &Guest) -> Result<()> {
    let saved = m.vnvme(&["save"])?;
    let fine = format!(
        "\n[[vhost-user-blk]]\nsocket = \"{}\"\nvolume = \"mem://1M\"\n",
        m.socket("fine").display()
    );
    let file = m.socket("wanted.toml");
    let words = file.display().to_string();
    let with = |more: String| fs::write(&file, format!("{saved}{fine}{more}"));
    let export = |volume: &str| {
        let socket = m.socket("bad");
        format!(
            "[[vhost-user-blk]]\nsocket = \"{}\"\nvolume = \"{volume}\"\n",
            socket.display()
        )
    };
    // What only an attempt shows, what is seen at once, and what has a client.
    with(export(&m.file("nothing.raw")))?;
    m.refused(&["apply", &words], "nothing.raw")?;
    with(export("mem://1M?nonsense=1"))?;
    m.refused(&["apply", &words], "nonsense")?;
    with(export("/etc/hostname"))?;
    m.refused(&["apply", &words], "allow")?;
    with("[[ublk]]\nvolume = \"mem://1M\"\nid = 70000\n".to_owned())?;
    m.refused(&["apply", &words], "allow = [\"ublk\"")?;
    fs::write(&file, &fine)?;
    m.refused(&["apply", &words], "a client is attached")?;
    ensure!(m.vnvme(&["save"])? == saved);
    ensure!(!m.socket("fine").exists() && !m.socket("bad").exists());
    // And one that can be had, to and fro.
    with(String::new())?;
    m.vnvme(&["apply", &words])?;
    ensure!(m.socket("fine").exists());
    fs::write(&file, &saved)?;
    m.vnvme(&["apply", &words])?;
    ensure!(m.vnvme(&["save"])? == saved && !m.socket("fine").exists());
    another_round(guest)
}

/// `$d` is the disk with this serial number, `$q` its name.
fn find(serial: &str) -> String {
    format!(
        "for try in $(seq 300); do
             for s in /sys/block/vd*/serial; do
                 [ \"$(cat $s 2>/dev/null)\" = {serial} ] && q=$(basename ${{s%/serial}})
             done
             [ \"$q\" ] && break; sleep 0.1
         done
         [ \"$q\" ] || {{ echo no such disk; exit 1; }}; d=/dev/$q\n"
    )
}

const VERIFY: &str = "fio --name=v --filename=$d --ioengine=io_uring --direct=1 --rw=randrw \
     --bsrange=4k-128k --iodepth=16 --size=4m --verify=crc32c --verify_fatal=1 \
     --verify_state_save=0";

fn export_grows(m: &Managed, guest: &Guest) -> Result<()> {
    m.vnvme(&["resize", "export", "48M"])?;
    let script = format!(
        "{}for try in $(seq 300); do [ $(cat /sys/block/$q/size) = 98304 ] && break; sleep 0.1; done
         [ $(cat /sys/block/$q/size) = 98304 ]; {VERIFY} --offset=40m",
        find("EXPORT")
    );
    run_for(guest, LONG_TIMEOUT, &script)?;
    m.refused(&["remove", "export"], "a client is attached")?;
    m.refused(&["attach", "export", "mem://1M"], "no controller")
}

fn until(what: &str, is_so: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + LONG_TIMEOUT;
    while !is_so() {
        ensure!(Instant::now() < deadline, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn export(m: &Managed, guest: &Guest) -> Result<()> {
    let file = m.disks.sparse("added.raw", 16)?.display().to_string();
    let socket = m.socket("added");
    let named = format!("socket={}", socket.display());
    for turn in 0..2 {
        let serial = format!("ADDED{turn}");
        let serial_is = format!("serial={serial}");
        m.vnvme(&["add", "vhost-user-blk", &named, &serial_is, &file])?;
        let backend = json!({"type": "socket", "data": {"server": false,
            "addr": {"type": "unix", "data": {"path": socket}}}});
        guest.qmp("chardev-add", json!({"id": "added", "backend": backend}))?;
        let driver = "vhost-user-blk-pci";
        let device = json!({"driver": driver, "id": "hot", "bus": "slot1", "chardev": "added"});
        guest.qmp("device_add", device)?;
        run_for(guest, LONG_TIMEOUT, &format!("{}{VERIFY}", find(&serial)))?;
        m.refused(&["remove", "added"], "a client is attached")?;
        guest.qmp("device_del", json!({"id": "hot"}))?;
        // The guest releases the disk first; its socket stays connected until QEMU removes it, too.
        until("QEMU has let it go", || {
            guest.qmp("chardev-remove", json!({"id": "added"})).is_ok()
        })?;
        until("it is free", || {
            let shown = m.vnvme(&["show", "added", "--json"]);
            shown.is_ok_and(|shown| !shown.contains("\"attached\": true"))
        })?;
        m.vnvme(&["remove", "added"])?;
        ensure!(!socket.exists() && Path::new(&file).exists());
    }
    another_round(guest)
}
