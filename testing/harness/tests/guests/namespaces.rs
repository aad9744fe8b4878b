//! Namespaces that a Linux guest makes of a pool, by nvme-cli: each command in its effect.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use crate::common::{Checks, Disks, LONG_TIMEOUT, Part, run, run_for};
use anyhow::{Result, ensure};
use harness::daemon::program;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Disk, Guest};
use serde_json::Value;

/// `$c` is the controller. `there N` waits for namespace N, which is `$d` then, and `gone N` until
/// there is none; `field NAME` is a number that Identify Controller has. Linux numbers its disks as
/// it happens to find them.
const LIB: &str = r#"
c=/dev/$(ctrl 1)
there() { d=$(wait_disk 1 $1); }
gone() {
    for try in $(seq 100); do
        disk 1 $1 >/dev/null || return 0
        sleep 0.1
    done
    echo "namespace $1 does not go"; exit 1
}
field() { nvme id-ctrl $c | sed -n "s/^$1 *: *//p"; }
listed() { nvme list-ns $c $2 | grep -q ":0x$1\$"; }
"#;

struct Pooled {
    disks: Disks,
    config: PathBuf,
}

impl Pooled {
    fn new() -> Result<Self> {
        let disks = Disks::new()?;
        let at = |name: &str| disks.dir().join(name);
        let volume = disks.sparse("own.raw", 8)?;
        fs::create_dir(at("pool"))?;
        let config = at("vnvme.toml");
        let text = format!(
            "[process]\nworkers = 2\ncontrol = {:?}\n\
             [[controller]]\nname = \"d\"\nsocket = {:?}\npool = {:?}\npool-capacity = \"256M\"\n\
             [[controller.namespace]]\nvolume = {volume:?}\n",
            at("control"),
            at("d.sock"),
            at("pool"),
        );
        fs::write(&config, text)?;
        Ok(Self { disks, config })
    }

    fn start(&self) -> Result<Daemon> {
        let socket = self.disks.dir().join("d.sock");
        Daemon::builder("namespaces")
            .config(&self.config, &socket)
            .start()
    }

    /// Files of namespaces.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(self.disks.dir().join("pool"))? {
            let path = entry?.path();
            all.extend(
                path.extension()
                    .is_some_and(|raw| raw == "raw")
                    .then_some(path),
            );
        }
        Ok(all)
    }

    /// What the operator is told of the disk.
    fn show(&self) -> Result<Value> {
        let control = self.disks.dir().join("control");
        let mut command = Command::new(program()?);
        let output = command
            .args(["show", "d", "--json", "--control"])
            .arg(control)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{said}");
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

fn script(guest: &Guest, text: &str) -> Result<String> {
    run(guest, &format!("{LIB}\n{text}"))
}

/// The pool in two guests that others share: the second one, at the next process, has what the
/// first one has made.
pub struct Namespaces {
    daemon: Daemon,
    pooled: Pooled,
}

impl Namespaces {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip(
                "namespaces::a_guest_makes_and_removes_its_own_disks",
                "QEMU's controller has no namespace management",
            );
            return Ok(None);
        }
        let pooled = Pooled::new()?;
        let daemon = pooled.start()?;
        Ok(Some(Box::new(Namespaces { daemon, pooled })))
    }
}

impl Part for Namespaces {
    fn name(&self) -> &'static str {
        "namespaces"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        let pooled = &self.pooled;
        checks.check("id-ctrl tells of the pool", || capacity(guest));
        checks.check("create-ns, list-ns --all", || create(guest, pooled));
        checks.check("attach-ns: the disk appears, and holds data", || {
            attach(guest, pooled)
        });
        checks.check("detach-ns under I/O: the disk disappears", || detach(guest));
        checks.check("what is wrong is refused", || refused(guest));
        checks.check("delete-ns: it is gone, and its capacity is back", || {
            delete(guest, pooled)
        });
        checks.check("fio on a namespace that goes while it is written", || {
            busy(guest)
        });
        checks.check("one stays", || stays(guest));
        Ok(())
    }

    fn restart(&mut self) -> Result<()> {
        self.daemon.terminate()?;
        self.daemon = self.pooled.start()?;
        Ok(())
    }

    fn check_again(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("after a restart", || after_restart(guest, &self.pooled));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

fn capacity(guest: &Guest) -> Result<()> {
    script(
        guest,
        "[ $(($(field oacs) & 8)) = 8 ]
         [ $(field unvmcap) = $((256 << 20)) ]; [ $(field tnvmcap) = $((264 << 20)) ]
         [ $(field sanicap) = 0 ]",
    )?;
    Ok(())
}

fn create(guest: &Guest, pooled: &Pooled) -> Result<()> {
    script(
        guest,
        "nvme create-ns $c --nsze=131072 --ncap=131072 --flbas=0 | grep -q 'nsid:2'
         nvme create-ns $c --nsze=32768 --ncap=32768 --block-size=512 | grep -q 'nsid:3'
         listed 2 --all && listed 3 --all && ! listed 2 || exit 1
         [ $(field unvmcap) = $((176 << 20)) ]
         [ $(nvme id-ns $c -n 2 --force | sed -n 's/^nsze *: *//p') = 0x20000 ]
         ! disk 1 2 && ! disk 1 3",
    )?;
    ensure!(pooled.files()?.len() == 2, "{:?}", pooled.files()?);
    let shown = pooled.show()?;
    ensure!(shown["namespaces"][1]["of_guest"] == "allocated", "{shown}");
    Ok(())
}

fn attach(guest: &Guest, pooled: &Pooled) -> Result<()> {
    let text = format!(
        "{LIB}
         nvme attach-ns $c --namespace-id=2 --controllers=1
         there 2; listed 2; nvme list-ctrl $c --namespace-id=2 | grep -q ':0x1$'
         [ $(blockdev --getsize64 $d) = $((64 << 20)) ]
         fio --name=v --filename=$d --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite \\
             --bs=16k --size=32m --verify=crc32c --do_verify=1 --output-format=terse >/tmp/fio \\
             || {{ cat /tmp/fio; exit 1; }}
         head -c 1048576 /dev/urandom >/tmp/random
         dd if=/tmp/random of=$d bs=1M seek=33 oflag=direct conv=fsync 2>/dev/null
         dd if=$d bs=1M skip=33 count=1 iflag=direct 2>/dev/null | cmp - /tmp/random"
    );
    run_for(guest, LONG_TIMEOUT, &text)?;
    let random = guest.pull_file("/tmp/random")?;
    let mut found = 0;
    for file in pooled.files()? {
        let bytes = fs::read(&file)?;
        found += usize::from(bytes.get(33 << 20..34 << 20) == Some(&random[..]));
    }
    ensure!(found == 1, "{found} files have what the guest wrote");
    let shown = pooled.show()?;
    ensure!(shown["namespaces"][1]["of_guest"] == "attached", "{shown}");
    Ok(())
}

fn detach(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme detach-ns $c --namespace-id=2 --controllers=1
         gone 2; ! listed 2 && listed 2 --all || exit 1
         nvme attach-ns $c --namespace-id=2 --controllers=1
         there 2
         dd if=$d bs=1M skip=33 count=1 iflag=direct 2>/dev/null | cmp - /tmp/random",
    )?;
    Ok(())
}

fn refused(guest: &Guest) -> Result<()> {
    script(
        guest,
        "refuses() {
             words=$1; shift
             if said=$(nvme \"$@\" 2>&1); then echo \"$* was done\"; exit 1; fi
             echo \"$said\" | grep -qi \"$words\" || { echo \"$*: $said\"; exit 1; }
         }
         refuses 'insufficient' create-ns $c --nsze=1000000 --ncap=1000000 --flbas=0
         refuses 'thin' create-ns $c --nsze=16 --ncap=8 --flbas=0
         refuses 'format' create-ns $c --nsze=16 --ncap=16 --flbas=3
         refuses 'already attached' attach-ns $c --namespace-id=2 --controllers=1
         refuses 'not attached' detach-ns $c --namespace-id=3 --controllers=1
         refuses 'controller list' attach-ns $c --namespace-id=3 --controllers=7
         refuses 'denied' delete-ns $c --namespace-id=1
         refuses 'denied' detach-ns $c --namespace-id=1 --controllers=1
         disk 1 1",
    )?;
    Ok(())
}

fn delete(guest: &Guest, pooled: &Pooled) -> Result<()> {
    script(
        guest,
        "nvme delete-ns $c --namespace-id=2; gone 2
         nvme delete-ns $c --namespace-id=3
         ! listed 2 --all && ! listed 3 --all || exit 1
         ! nvme delete-ns $c --namespace-id=3 2>/dev/null || exit 1
         [ $(field unvmcap) = $((256 << 20)) ]",
    )?;
    ensure!(pooled.files()?.is_empty(), "{:?}", pooled.files()?);
    Ok(())
}

/// Its I/O fails, the neighbour's does not.
fn busy(guest: &Guest) -> Result<()> {
    let text = format!(
        "{LIB}
         fio_on() {{
             fio --name=$1 --filename=$1 --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite \\
                 --bs=4k --size=4m --time_based --runtime=$2 --output-format=terse \\
                 --allow_file_create=0
         }}
         writes() {{
             for try in $(seq 600); do
                 set -- $1 $(cat /sys/block/${{1##*/}}/stat)
                 [ $6 -gt 0 ] && return 0
                 sleep 0.1
             done
             echo \"nothing is written to $1\"; exit 1
         }}
         for turn in 1 2 3; do
             nvme create-ns $c --nsze=65536 --ncap=65536 --flbas=0 | grep -q 'nsid:2'
             nvme attach-ns $c --namespace-id=2 --controllers=1
             there 2
             rm -f /tmp/stop
             (while [ ! -e /tmp/stop ]; do fio_on $(disk 1 1) 1 || exit 1; done) >/tmp/own 2>&1 & own=$!
             fio_on $d 60 >/tmp/goes 2>&1 & goes=$!
             writes $(disk 1 1); writes $d
             [ $turn = 1 ] && nvme detach-ns $c --namespace-id=2 --controllers=1
             nvme delete-ns $c --namespace-id=2
             gone 2
             ! wait $goes || exit 1
             touch /tmp/stop
             wait $own || {{ cat /tmp/own; exit 1; }}
         done
         [ $(field unvmcap) = $((256 << 20)) ]"
    );
    run_for(guest, LONG_TIMEOUT, &text)?;
    Ok(())
}

fn stays(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme create-ns $c --nsze=65536 --ncap=65536 --flbas=0 | grep -q 'nsid:2'
         nvme create-ns $c --nsze=8 --ncap=8 --flbas=0 | grep -q 'nsid:3'
         nvme attach-ns $c --namespace-id=2 --controllers=1
         there 2
         mkfs.ext4 -q $d; mkdir -p /tmp/m; mount $d /tmp/m
         echo 'it stays' >/tmp/m/file; umount /tmp/m",
    )?;
    Ok(())
}

fn after_restart(guest: &Guest, pooled: &Pooled) -> Result<()> {
    script(
        guest,
        "listed 2 && ! listed 3 && listed 3 --all || exit 1
         there 2; mkdir -p /tmp/m; mount $d /tmp/m
         [ \"$(cat /tmp/m/file)\" = 'it stays' ]; umount /tmp/m
         nvme delete-ns $c --namespace-id=2; gone 2
         nvme delete-ns $c --namespace-id=3",
    )?;
    ensure!(pooled.files()?.is_empty(), "{:?}", pooled.files()?);
    Ok(())
}
