//! A zoned namespace under Linux: what its block layer makes of it, and fio. Its queues are on two
//! workers, and migrate; or it is one that two disks of a subsystem share.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{
    Checks, Disks, LONG_TIMEOUT, Part, allocated, in_two_guests, kill_serving, run, run_for,
};
use anyhow::{Result, ensure};
use harness::daemon::{DaemonBuilder, program};
use harness::progress::{say, skip};
use harness::served::Controller;
use harness::{Daemon, Disk, Guest};

/// `$d` is the disk.
const LIB: &str = "d=$(wait_disk 1 1); q=/sys/block/$(basename $d)/queue";

/// A zone has 8192 blocks of 512 bytes, 6144 of which can be written.
const ZONES: &str = "zone-size=4M&zone-capacity=3M&max-open-zones=4&max-active-zones=6";

/// Without limits: with 14 active zones btrfs of Linux 6.12 aborts a transaction (EAGAIN), or runs
/// out of space while it moves what is left of its zones, though no command fails and nothing is
/// killed. fio keeps to limits, above.
const OF_BTRFS: &str = "zone-size=8M&zone-capacity=6M";

fn volume(disk: &Path, zones: &str) -> String {
    let table = disk.with_extension("zones");
    format!("{}?{zones}&zone-table={}", disk.display(), table.display())
}

/// Queues are on two workers, and migrate all the time.
fn two_workers(name: &str) -> DaemonBuilder {
    let mut builder = Daemon::builder(name);
    for word in ["--workers", "2", "--spread", "stir"] {
        builder = builder.arg(word);
    }
    builder
}

/// A disk of zones behind a daemon, in a guest that others share.
struct Zoned {
    disk: PathBuf,
    daemon: Daemon,
    _disks: Disks,
}

impl Zoned {
    /// Serves a disk of so many MiB with these zones; `None` where it was skipped.
    fn serve(name: &str, mib: u64, zones: &str, keeper: bool) -> Result<Option<Zoned>> {
        if Controller::chosen()? == Controller::Qemu {
            skip(&format!("zones::{name}"), "the zones are vnvme's");
            return Ok(None);
        }
        let disks = Disks::new()?;
        let disk = disks.sparse("disk.raw", mib)?;
        let mut daemon = two_workers(name);
        if keeper {
            daemon = daemon.arg("--keeper").arg("process");
        }
        Ok(Some(Zoned {
            daemon: daemon.volume(volume(&disk, zones)).start()?,
            disk,
            _disks: disks,
        }))
    }
}

fn script(guest: &Guest, text: &str) -> Result<String> {
    run(guest, &format!("{LIB}\n{text}"))
}

/// A zoned disk under fio.
pub struct ZonedDisk(Zoned);

impl ZonedDisk {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        // Behind the last zone 1 MiB is left.
        let zoned = Zoned::serve("zones", 65, ZONES, false)?;
        Ok(zoned.map(|zoned| Box::new(ZonedDisk(zoned)) as Box<dyn Part>))
    }
}

impl Part for ZonedDisk {
    fn name(&self) -> &'static str {
        "zones"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.0.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("what Linux sees", || sees(guest));
        checks.check("fio verify, --zonemode=zbd", || fio(guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.0.daemon.terminate()
    }
}

fn sees(guest: &Guest) -> Result<()> {
    script(
        guest,
        "[ $(cat $q/zoned) = host-managed ]; [ $(cat $q/nr_zones) = 16 ]
         [ $(cat $q/chunk_sectors) = 8192 ]; [ $(cat $q/max_open_zones) = 4 ]
         [ $(cat $q/max_active_zones) = 6 ]; [ $(cat $q/zone_append_max_bytes) -gt 65536 ]
         [ $(blockdev --getsize64 $d) = 67108864 ]",
    )?;
    Ok(())
}

/// Every zone is written from its start, several at a time, and read back.
fn fio(guest: &Guest) -> Result<()> {
    let text = format!(
        "{LIB}
         fio --name=zones --filename=$d --direct=1 --zonemode=zbd --ioengine=libaio --iodepth=8 \\
             --rw=randwrite --bs=64k --size=64m --io_size=40m --max_open_zones=4 --verify=crc32c \\
             --verify_backlog=64 --output-format=terse >/tmp/fio || {{ cat /tmp/fio; exit 1; }}
         fio --name=seq --filename=$d --direct=1 --zonemode=zbd --ioengine=libaio --iodepth=4 \\
             --rw=write --bs=128k --size=24m --do_verify=1 --verify=crc32c --output-format=terse \\
             >/tmp/fio || {{ cat /tmp/fio; exit 1; }}"
    );
    run_for(guest, LONG_TIMEOUT, &text)?;
    Ok(())
}

/// Areas of 128 blocks, flushed by 32, of two zones at a time.
const AREAS: &str =
    "zone-size=4M&zone-capacity=3M&zrwa-size=64K&zrwa-granularity=16K&zrwa-resources=2";

/// `zone` says of the zone that begins at a block: its state, write pointer and attributes. `put`
/// and `get` write and read blocks, of one byte, by passthrough: the block layer keeps to the write
/// pointer. `refused`: by this status.
const OF_AREAS: &str = r#"
n=/dev/ng${d#/dev/nvme}
zone() {
    nvme zns report-zones $d --descs=1 --start-lba=$1 >/tmp/zone
    x='*\([0-9a-fx]*\) .*'
    set -- $(sed -n "s/.*WP: ${x}State: ${x}Attrs: $x/\2 \1 \3/p" /tmp/zone)
    echo $(($1)) $(($2)) $(($3))
}
of() { head -c $(($1 * 512)) /dev/zero | tr '\0' "$2"; }
put() {
    of $2 $3 >/tmp/put
    nvme write $n -s $1 -c $(($2 - 1)) -z $(($2 * 512)) --data=/tmp/put
}
get() {
    of $2 $3 >/tmp/put
    rm -f /tmp/get
    nvme read $n -s $1 -c $(($2 - 1)) -z $(($2 * 512)) --data=/tmp/get >/dev/null 2>&1
    cmp /tmp/put /tmp/get
}
is() { [ "$1" = "$2" ] || { echo "$1, and not $2"; exit 1; }; }
refused() {
    wanted=$1; shift
    if "$@" >/tmp/said 2>&1; then echo "$*: not refused"; exit 1; fi
    grep -qi "$wanted" /tmp/said || { cat /tmp/said; exit 1; }
}
"#;

/// Zone Random Write Areas by nvme-cli, and what is left of them when the process was killed.
pub struct Areas(Zoned);

impl Areas {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        let zoned = Zoned::serve("areas", 32, AREAS, true)?;
        Ok(zoned.map(|zoned| Box::new(Areas(zoned)) as Box<dyn Part>))
    }
}

impl Part for Areas {
    fn name(&self) -> &'static str {
        "areas"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.0.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        let of_areas = |text: &str| script(guest, &format!("{OF_AREAS}\n{text}"));
        checks.check("what there is", || of_areas(WHAT_THERE_IS).map(drop));
        checks.check("writes in any order, and flushes", || {
            of_areas(ANY_ORDER).map(drop)
        });
        checks.check("what is refused", || of_areas(REFUSED).map(drop));
        checks.check("the process is killed", || {
            kill_serving(&self.0.daemon)?;
            of_areas(AFTER).map(drop)
        });
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.0.daemon.terminate()
    }
}

const WHAT_THERE_IS: &str = r#"
nvme zns id-ns $d >/tmp/id
field() { sed -n "s/^$1 *: *\([0-9a-fx]*\).*/\1/p" /tmp/id; }
is $(($(field ozcs) & 2)) 2; is $(($(field numzrwa))) 1; is $(($(field zrwacap))) 1
is $(field zrwafg) 32; is $(field zrwasz) 128
"#;

/// The second zone begins at block 8192.
const ANY_ORDER: &str = r#"
nvme zns open-zone $d --start-lba=8192 --zrwaa
is "$(zone 8192)" '48 8192 8'
put 8292 8 a; put 8192 8 b; put 8294 2 c
is "$(zone 8192)" '48 8192 8'
get 8292 2 a; get 8294 2 c; get 8296 4 a; get 8192 8 b
# Ten blocks beyond the area take the pointer along.
put 8320 10 d; is "$(zone 8192)" '48 8224 8'; get 8320 10 d; get 8192 8 b
nvme zns zrwa-flush-zone $d --lba=8255; is "$(zone 8192)" '48 8256 8'
"#;

const REFUSED: &str = r#"
refused 'invalid write' put 8255 1 x
refused 'invalid write' put 8511 2 x
refused 'invalid field' nvme zns zrwa-flush-zone $d --lba=8256
refused operation nvme zns zrwa-flush-zone $d --lba=8384
refused operation nvme zns zrwa-flush-zone $d --lba=100
of 1 x >/tmp/put
refused operation nvme zns zone-append $d --zslba=8192 -z 512 --data=/tmp/put
refused operation nvme zns open-zone $d --start-lba=8192 --zrwaa
nvme zns open-zone $d --start-lba=16384 --zrwaa
refused 'zrwa' nvme zns open-zone $d --start-lba=24576 --zrwaa
is "$(zone 24576)" '16 24576 0'; is "$(zone 8192)" '48 8256 8'
# The zone that is finished gives the area to another one.
nvme zns finish-zone $d --start-lba=16384; nvme zns open-zone $d --start-lba=24576 --zrwaa
is "$(zone 24576)" '48 24576 8'
"#;

const AFTER: &str = r#"
is "$(zone 8192)" '48 8256 8'; is "$(zone 24576)" '48 24576 8'
get 8292 2 a; get 8294 2 c; get 8320 10 d
put 8300 4 e; get 8300 4 e
nvme zns close-zone $d --start-lba=8192; is "$(zone 8192)" '64 8256 8'
nvme zns zrwa-flush-zone $d --lba=8383; is "$(zone 8192)" '32 8384 8'
nvme zns reset-zone $d --start-lba=8192; is "$(zone 8192)" '16 8192 0'
get 8300 4 '\0'; get 8192 8 '\0'
"#;

/// Two file systems of zones, which a second guest reads: no cache has what it finds.
#[test]
fn file_systems_of_zones_outlive_kills() -> Result<()> {
    let builder = || Guest::builder("zones");
    in_two_guests(builder, [Btrfs::serve()?, FullBtrfs::serve()?])
}

/// A file system that appends to zones and resets them: written, half of that removed, and written
/// again, while the process that serves it is killed again and again.
struct Btrfs(Zoned);

impl Btrfs {
    fn serve() -> Result<Option<Box<dyn Part>>> {
        let zoned = Zoned::serve("btrfs", 48 * 8, OF_BTRFS, true)?;
        Ok(zoned.map(|zoned| Box::new(Btrfs(zoned)) as Box<dyn Part>))
    }
}

impl Part for Btrfs {
    fn name(&self) -> &'static str {
        "btrfs"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.0.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        let daemon = &self.0.daemon;
        checks.check("it is made and mounted", || made(guest));
        checks.check("a third of it is written", || {
            killed_meanwhile(daemon, guest, FILL)
        });
        checks.check("half of it is written again", || {
            killed_meanwhile(daemon, guest, REPLACE)
        });
        checks.check("it is whole", || whole(guest));
        Ok(())
    }

    fn check_again(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("the next guest finds it whole", || whole(guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.0.daemon.terminate()
    }
}

/// `fill FIRST LAST` writes files with numbers, each made durable, and keeps their checksums.
/// `empty` is how many zones are.
const FILES: &str = r#"
modprobe btrfs; mkdir -p /tmp/m
[ -e /dev/btrfs-control ] || mknod /dev/btrfs-control c 10 234
fill() {
    for n in $(seq $1 $2); do
        dd if=/dev/urandom of=/tmp/file bs=1000000 count=3 2>/dev/null; cp /tmp/file /tmp/m/$n; sync /tmp/m/$n
        (cd /tmp; md5sum file | sed "s/file/$n/") >>/tmp/sums
    done
    sync
}
empty() { nvme zns report-zones $d --descs=48 | grep -c 'State: 0x10'; }
"#;

fn made(guest: &Guest) -> Result<()> {
    script(
        guest,
        &format!(
            "{FILES}
             mkfs.btrfs -q -O zoned -d single -m single $d
             mount -t btrfs $d /tmp/m; dmesg | grep -q 'zoned mode enabled with zone size 8388608'
             [ $(empty) -gt 40 ]"
        ),
    )?;
    Ok(())
}

const FILL: &str = r#"
fill 1 40; echo $(empty) zones empty
[ $(empty) -lt 26 ]
"#;

/// What is left of zones moves, and those that have become empty are reset by the file system.
const REPLACE: &str = r#"
for turn in 1 2; do
    for n in $(seq 1 2 40); do rm /tmp/m/$n; sed -i "/ $n\$/d" /tmp/sums; done; sync
    btrfs balance start -dusage=60 /tmp/m >/tmp/said 2>&1 || { cat /tmp/said; dmesg | tail; exit 1; }
    sync; echo $(empty) zones empty
    [ $(empty) -gt 27 ]
    for n in $(seq 1 2 40); do fill $n $n; done; echo $(empty) zones empty
done
cp /tmp/sums /tmp/m/sums
"#;

fn whole(guest: &Guest) -> Result<()> {
    let text = format!(
        "{LIB}\n{FILES}
         ! grep -q /tmp/m /proc/mounts || umount /tmp/m
         btrfs check $d >/tmp/check 2>&1 || {{ cat /tmp/check; exit 1; }}
         mount -t btrfs $d /tmp/m; cd /tmp/m; md5sum -c sums | grep -v OK && exit 1
         [ $(wc -l <sums) = 40 ]
         btrfs scrub start -B /tmp/m >/tmp/scrub 2>&1 || {{ cat /tmp/scrub; exit 1; }}
         grep -q 'no errors found' /tmp/scrub || {{ cat /tmp/scrub; exit 1; }}
         dmesg | grep -Ei 'BTRFS (error|critical)|I/O error|nvme.*(timeout|abort|reset)' && exit 1
         cd /; umount /tmp/m"
    );
    run_for(guest, LONG_TIMEOUT, &text)?;
    Ok(())
}

/// The process that serves is killed every two seconds while the guest works.
fn killed_meanwhile(daemon: &Daemon, guest: &Guest, text: &str) -> Result<()> {
    let ended = AtomicBool::new(false);
    let (said, kills) = std::thread::scope(|scope| {
        let killer = scope.spawn(|| -> Result<usize> {
            let mut kills = 0;
            while !ended.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_secs(2));
                kill_serving(daemon)?;
                kills += 1;
            }
            Ok(kills)
        });
        let said = run_for(guest, LONG_TIMEOUT, &format!("{LIB}\n{FILES}\n{text}"));
        ended.store(true, Ordering::Release);
        (said, killer.join().unwrap())
    });
    let (said, kills) = (said?, kills?);
    eprintln!("btrfs: {}, {kills} kills", said.trim().replace('\n', ", "));
    ensure!(kills > 2, "{kills} kills");
    Ok(())
}

/// 32 zones: what is written of each is what a guest without an accelerator writes in a moment.
const SMALL: &str = "zone-size=4M&zone-capacity=3M";
const SMALL_ZONES: usize = 32;

/// A file system of zones that is written until it has no room, while the process that serves it is
/// killed; checked, and checked by another guest. It is not emptied again: of files that are
/// deleted then, btrfs of Linux 6.12 gives few zones back, and it has no room to move the rest.
struct FullBtrfs {
    zoned: Zoned,
    sums: String,
}

impl FullBtrfs {
    fn serve() -> Result<Option<Box<dyn Part>>> {
        let zoned = Zoned::serve("full", SMALL_ZONES as u64 * 4, SMALL, true)?;
        let sums = String::new();
        Ok(zoned.map(|zoned| Box::new(FullBtrfs { zoned, sums }) as Box<dyn Part>))
    }
}

impl Part for FullBtrfs {
    fn name(&self) -> &'static str {
        "full btrfs"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.zoned.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("it is filled while the process is killed", || {
            run(guest, &full(MAKE))?;
            self.sums = filled_while_killed(&self.zoned.daemon, guest, &self.zoned.disk)?;
            Ok(())
        });
        checks.check("it is whole", || holds(guest, &self.sums));
        Ok(())
    }

    fn check_again(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("the next guest finds it whole", || holds(guest, &self.sums));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.zoned.daemon.terminate()
    }
}

/// `mounted` has the kernel leave zones alone that are nearly empty: on a disk that is full, what
/// it wants to move from them has no place, and it logs errors.
///
/// `fill` writes files until there is no room, each made durable, and keeps the checksums of those
/// that were written whole; one is not. At last it reports the result.
const UNTIL_FULL: &str = r#"
modprobe btrfs; mkdir -p /tmp/m
[ -e /dev/btrfs-control ] || mknod /dev/btrfs-control c 10 234
empty() { nvme zns report-zones $d --descs=32 | grep -c 'State: 0x10' || true; }
mounted() {
    mount -t btrfs $d /tmp/m
    for value in $(find /sys/fs/btrfs -name bg_reclaim_threshold); do echo 0 >$value; done
}
fill() {
    n=0
    while
        dd if=/dev/urandom of=/tmp/file bs=1000000 count=1 2>/dev/null
        cp /tmp/file /tmp/m/$n 2>/tmp/said && sync /tmp/m/$n 2>>/tmp/said
    do
        (cd /tmp; md5sum file | sed "s/file/$n/") >>/tmp/sums
        n=$((n + 1))
    done
    grep -q 'No space left on device' /tmp/said || { cat /tmp/said; dmesg | tail; exit 1; }
    rm -f /tmp/m/$n; sync
    cat /tmp/sums; echo $(wc -l </tmp/sums) files, $(empty) zones empty
}
"#;

const MAKE: &str = r#"
mkfs.btrfs -q -O zoned -d single -m single $d
mounted; dmesg | grep -q 'zoned mode enabled with zone size 4194304'
[ $(empty) -gt 24 ]
"#;

fn full(text: &str) -> String {
    format!("{LIB}\n{UNTIL_FULL}\n{text}")
}

/// The checksums of what `fill` has written; what it said is printed, and was much.
fn filled(said: &str) -> Result<String> {
    let (sums, end) = said.trim_end().rsplit_once('\n').unwrap_or_default();
    let files = sums.lines().count();
    say(format!(
        "zones: filled: {end}, of {SMALL_ZONES}; {files} MB of {MAX_UNITS} MB"
    ));
    let empty = end.split_whitespace().rev().nth(2);
    let empty: usize = empty.unwrap_or_default().parse()?;
    ensure!(files * 2 > MAX_UNITS && empty <= SMALL_ZONES / 4, "{end}");
    Ok(format!("{sums}\n"))
}

/// What the zones take, in units of 10^6 bytes.
const MAX_UNITS: usize = SMALL_ZONES * 3 * 1_048_576 / 1_000_000;

/// The process that serves is killed once when a third is written.
fn filled_while_killed(daemon: &Daemon, guest: &Guest, disk: &Path) -> Result<String> {
    std::thread::scope(|scope| {
        let fill = scope.spawn(|| run_for(guest, LONG_TIMEOUT, &full("fill")));
        while allocated(disk)? < SMALL_ZONES as u64 * (1 << 20) {
            ensure!(!fill.is_finished(), "{:?}", fill.join().unwrap());
            std::thread::sleep(Duration::from_millis(50));
        }
        kill_serving(daemon)?;
        ensure!(!fill.is_finished(), "it was full before it was killed");
        filled(&fill.join().unwrap()?)
    })
}

fn holds(guest: &Guest, sums: &str) -> Result<()> {
    let text = full(&format!(
        "! grep -q /tmp/m /proc/mounts || umount /tmp/m
         btrfs check $d >/tmp/check 2>&1 || {{ cat /tmp/check; exit 1; }}
         mounted; cd /tmp/m
         md5sum -c <<E >/tmp/found 2>&1 || {{ grep -v OK /tmp/found; exit 1; }}\n{sums}E
         btrfs scrub start -B /tmp/m >/tmp/scrub 2>&1 || {{ cat /tmp/scrub; exit 1; }}
         grep -q 'no errors found' /tmp/scrub || {{ cat /tmp/scrub; exit 1; }}
         dmesg | grep -Ei 'BTRFS (error|critical)|I/O error|nvme.*(timeout|abort|reset)' && exit 1
         cd /; umount /tmp/m"
    ));
    run_for(guest, LONG_TIMEOUT, &text)?;
    Ok(())
}

// ---- two paths of one guest

const HOST: &str = "0123456789abcdef0123456789abcdef";
/// The disks, their numbers in the subsystem, and how the namespace is reached by them.
const PATHS: [(&str, u32, &str); 2] = [("a", 1, "optimized"), ("b", 2, "non-optimized")];

/// Two disks of one subsystem that have a zoned namespace together.
struct Paths {
    disks: Disks,
}

impl Paths {
    /// Of these hosts.
    fn of(hosts: [&str; 2], zones: &str) -> Result<Self> {
        let disks = Disks::new()?;
        let at = |name: &str| disks.dir().join(name).display().to_string();
        let volume = volume(&disks.sparse("disk.raw", 64)?, zones);
        let mut config = format!("[process]\nworkers = 2\ncontrol = {:?}\n", at("control"));
        for ((name, cntlid, state), host) in PATHS.into_iter().zip(hosts) {
            config += &format!(
                "[[controller]]\nname = \"{name}\"\nsocket = {:?}\nsubsystem = \"zones\"\n\
                 cntlid = {cntlid}\nhost-id = \"{host}\"\n\
                 [[controller.namespace]]\nvolume = {volume:?}\nana-state = \"{state}\"\n",
                at(name)
            );
        }
        fs::write(disks.dir().join("vnvme.toml"), config)?;
        Ok(Self { disks })
    }

    fn at(&self, name: &str) -> PathBuf {
        self.disks.dir().join(name)
    }

    fn serve(&self, name: &str) -> Result<Daemon> {
        let daemon = Daemon::builder(name);
        daemon.config(&self.at("vnvme.toml"), &self.at("b")).start()
    }

    fn disks(&self) -> Vec<Disk> {
        let disk = |name| Disk::VfioUser {
            socket: self.at(name),
        };
        ["a", "b"].map(disk).into()
    }

    fn set(&self, disk: &str, state: &str) -> Result<()> {
        let mut command = Command::new(program()?);
        let command = command.args(["ana", disk, "--set", state, "--control"]);
        let output = command.arg(self.at("control")).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{disk} {state}: {said}");
        Ok(())
    }
}

/// `$n` is the disk for passthrough. `zone` says of the zone that begins at a block: its state and
/// write pointer; `of`: so many blocks of a byte; `done_by`: reads or writes by a controller.
/// `reached N STATE`: the guest knows that state of the N-th controller's path, soon.
const OF_PATHS: &str = r#"
path() { ls -d /sys/class/nvme/$(ctrl $1)/nvme*c*n*; }
reached() {
    for try in $(seq 100); do
        [ "$(cat $(path $1)/ana_state)" = $2 ] && return 0
        sleep 0.1
    done
    echo "controller $1 is $(cat $(path $1)/ana_state) to the guest, and not $2"
    exit 1
}
is() { [ "$1" = "$2" ] || { echo "$3: $1, and not $2"; exit 1; }; }
zone() {
    nvme zns report-zones $d --descs=1 --start-lba=$1 >/tmp/zone
    x='*\([0-9a-fx]*\) .*'
    set -- $(sed -n "s/.*WP: ${x}State: ${x}/\2 \1/p" /tmp/zone)
    echo $(($1)) $(($2))
}
of() { head -c $(($1 * 512)) /dev/zero | tr '\0' "$2"; }
done_by() { nvme smart-log /dev/$(ctrl $1) | sed -n "s/^host_$2_commands//p" | tr -dc 0-9; }
n=/dev/ng${d#/dev/nvme}
"#;

/// Both paths in a guest that puts paths together.
pub struct ZonePaths {
    paths: Paths,
    daemon: Daemon,
}

impl ZonePaths {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip("zones::paths_of_a_zoned_disk", "the zones are vnvme's");
            return Ok(None);
        }
        let paths = Paths::of([HOST; 2], ZONES)?;
        let daemon = paths.serve("zone-paths")?;
        Ok(Some(Box::new(ZonePaths { paths, daemon })))
    }
}

impl Part for ZonePaths {
    fn name(&self) -> &'static str {
        "zone paths"
    }

    fn disks(&self) -> Vec<Disk> {
        self.paths.disks()
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("two paths, one zoned disk", || {
            of_paths(guest, ONE_ZONED_DISK).map(drop)
        });
        checks.check("zones are of both paths", || by_turns(&self.paths, guest));
        checks.check("changes under reads", || under_reads(&self.paths, guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

fn of_paths(guest: &Guest, text: &str) -> Result<String> {
    script(guest, &format!("{OF_PATHS}\n{text}"))
}

const ONE_ZONED_DISK: &str = "
is $(wait_disk 2 1) $d disks
is $(ls -d $(dirname /sys/class/nvme-subsystem/*/$(ctrl 1))/nvme*n1 | wc -l) 1 'number of disks'
reached 1 optimized; reached 2 non-optimized
is $(cat $q/zoned) host-managed zoned; is $(cat $q/nr_zones) 16 nr_zones
is $(cat $q/max_open_zones) 4 max_open_zones; is $(cat $q/max_active_zones) 6 max_active_zones
";

/// Appends and resets by the one path continue by the other. By passthrough: the block layer of
/// Linux since 6.10 has a write pointer of its own for each path, which does not know commands of
/// the others.
fn by_turns(paths: &Paths, guest: &Guest) -> Result<()> {
    for (turn, &(left, gone, number)) in TURNS.iter().cycle().take(6).enumerate() {
        paths.set(left, "optimized")?;
        paths.set(gone, "inaccessible")?;
        let text = format!(
            "reached {number} optimized; reached $((3 - {number})) inaccessible
             of 8 {turn} >/tmp/put
             nvme zns zone-append $n --zslba=0 -z 4096 --data=/tmp/put >/dev/null
             is \"$(zone 0)\" '{opened} {pointer}' 'zone 0'
             nvme read $n -s $(({turn} * 8)) -c 7 -z 4096 --data=/tmp/got >/dev/null 2>&1
             cmp /tmp/put /tmp/got",
            opened = 0x20,
            pointer = (turn + 1) * 8,
        );
        of_paths(guest, &text)?;
    }
    for (left, gone, number) in TURNS {
        paths.set(left, "optimized")?;
        paths.set(gone, "inaccessible")?;
        let text = format!(
            "reached {number} optimized
             nvme zns reset-zone $n --start-lba=0; is \"$(zone 0)\" '16 0' 'zone 0'
             of 8 r >/tmp/put
             nvme write $n -s 0 -c 7 -z 4096 --data=/tmp/put >/dev/null
             is \"$(zone 0)\" '32 8' 'zone 0'"
        );
        of_paths(guest, &text)?;
    }
    of_paths(guest, "nvme zns reset-zone $n --start-lba=0")?;
    Ok(())
}

/// The remaining path, the lost one, and the number of the former's controller.
const TURNS: [(&str, &str, u32); 2] = [("a", "b", 1), ("b", "a", 2)];

/// What each second brings, again and again: the states of both, one after the other. At its end
/// one of them can be used; in between there may be none.
const SECONDS: [[(&str, &str); 2]; 4] = [
    [("a", "inaccessible"), ("b", "optimized")],
    [("b", "change"), ("a", "optimized")],
    [("a", "persistent-loss"), ("b", "non-optimized")],
    [("b", "inaccessible"), ("a", "non-optimized")],
];

/// Paths change under reads of the block layer. Not under its writes: those that Linux 6.12 sends
/// another way it counts for the zone of the first path, warns (block/blk-zoned.c), and crashes.
fn under_reads(paths: &Paths, guest: &Guest) -> Result<()> {
    paths.set("a", "optimized")?;
    paths.set("b", "non-optimized")?;
    of_paths(
        guest,
        "reached 1 optimized; reached 2 non-optimized
         fio --name=paths --filename=$d --direct=1 --zonemode=zbd --ioengine=libaio --iodepth=8 \
             --rw=write --bs=64k --size=24m --max_open_zones=4 >/tmp/fio 2>&1 ||
             { cat /tmp/fio; exit 1; }
         sum() { dd if=$d bs=32k count=768 iflag=direct 2>/tmp/dd$1 | md5sum; }
         sum 0 >/tmp/sum
         for reader in 1 2 3; do
             (rounds=0; while [ ! -e /tmp/stop ]; do
                 sum $reader >/tmp/sum$reader; cmp /tmp/sum /tmp/sum$reader || break
                 rounds=$((rounds + 1))
             done; echo $rounds; [ -e /tmp/stop ] && echo well >/tmp/end$reader ||
                 echo failed >/tmp/end$reader) </dev/null >/tmp/rounds$reader 2>&1 &
         done",
    )?;
    let began = Instant::now();
    for (second, states) in (1..).zip(SECONDS.iter().cycle().take(12)) {
        for (disk, state) in states {
            paths.set(disk, state)?;
        }
        let next = Duration::from_secs(second);
        std::thread::sleep(next.saturating_sub(began.elapsed()));
    }
    let text = format!(
        "{LIB}\n{OF_PATHS}\ntouch /tmp/stop
         for reader in 1 2 3; do
             for try in $(seq 600); do [ -e /tmp/end$reader ] && break; sleep 0.1; done
             [ \"$(cat /tmp/end$reader)\" = well ] ||
                 {{ cat /tmp/dd$reader; dmesg | tail -20; exit 1; }}
         done
         if dmesg | grep -Ei 'I/O error|nvme.*(timeout|reset|removing)'; then exit 1; fi
         [ $(done_by 1 read) -gt 100 ] && [ $(done_by 2 read) -gt 100 ]
         echo rounds $(cat /tmp/rounds?), reads by both: $(done_by 1 read) $(done_by 2 read)"
    );
    let said = run_for(guest, LONG_TIMEOUT, &text)?;
    say(format!("zones: {}", said.trim()));
    Ok(())
}

// ---- two hosts

/// Two disks of one subsystem for two hosts, here in one guest: each has its own zones for Linux'
/// block layer, and both append to the same ones by passthrough.
pub struct ZoneHosts {
    hosts: Paths,
    daemon: Daemon,
}

impl ZoneHosts {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip("zones::hosts_of_a_zoned_disk", "the zones are vnvme's");
            return Ok(None);
        }
        let hosts = Paths::of([HOST, "fedcba9876543210fedcba9876543210"], ZONES_OF_HOSTS)?;
        let daemon = hosts.serve("zone-hosts")?;
        Ok(Some(Box::new(ZoneHosts { hosts, daemon })))
    }
}

impl Part for ZoneHosts {
    fn name(&self) -> &'static str {
        "zone hosts"
    }

    fn disks(&self) -> Vec<Disk> {
        self.hosts.disks()
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        for (what, text) in [
            ("two zoned disks, the same zones", TWO_ZONED_DISKS),
            ("fio of both, each in its zones", FIO_OF_BOTH),
            ("appends of both to one zone", APPENDS_OF_BOTH),
            ("reservations", RESERVED),
        ] {
            checks.check(what, || of_hosts(guest, text).map(drop));
        }
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

/// Each host's fio has four zones open, and its file system may have some.
const ZONES_OF_HOSTS: &str = "zone-size=4M&zone-capacity=3M&max-open-zones=8&max-active-zones=10";

fn of_hosts(guest: &Guest, text: &str) -> Result<String> {
    let text = format!("{LIB}\n{OF_PATHS}\ne=$(wait_disk 2 1); m=/dev/ng${{e#/dev/nvme}}\n{text}");
    run_for(guest, LONG_TIMEOUT, &text)
}

const TWO_ZONED_DISKS: &str = r#"
[ $d != $e ]
for disk in $d $e; do
    is $(cat /sys/block/$(basename $disk)/queue/zoned) host-managed $disk
    is $(cat /sys/block/$(basename $disk)/queue/nr_zones) 16 $disk
done
nvme zns open-zone $d --start-lba=8192
is "$(d=$e zone 8192)" '48 8192' 'the zone that the other has opened'
nvme zns close-zone $e --start-lba=8192
is "$(zone 8192)" '64 8192' 'the zone that the other has closed'
nvme zns reset-zone $d --start-lba=8192
is "$(d=$e zone 8192)" '16 8192' 'the zone that the other has reset'
"#;

const FIO_OF_BOTH: &str = r#"
job() {
    fio --name=zones --filename=$1 --direct=1 --zonemode=zbd --ioengine=libaio --iodepth=8 \
        --rw=randwrite --bs=64k --offset=$2 --size=32m --io_size=24m --max_open_zones=4 \
        --verify=crc32c --verify_fatal=1 --verify_state_save=0 --output-format=terse \
        >/tmp/fio$3 2>&1
}
job $d 0 1 & one=$!
job $e 32m 2 & two=$!
wait $one || { cat /tmp/fio1; dmesg | tail; exit 1; }
wait $two || { cat /tmp/fio2; dmesg | tail; exit 1; }
# What the one has written the other reads.
for disk in $d $e; do
    echo 3 >/proc/sys/vm/drop_caches
    for zone in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
        dd if=$disk bs=1M skip=$((zone * 4)) count=3 iflag=direct 2>/dev/null
    done | md5sum >/tmp/sum${disk#/dev/}
done
cmp /tmp/sum${d#/dev/} /tmp/sum${e#/dev/}
"#;

const APPENDS_OF_BOTH: &str = r#"
nvme zns reset-zone $n --select-all
appends() {
    of 8 $2 >/tmp/put$2
    for turn in $(seq 24); do
        nvme zns zone-append $1 --zslba=0 -z 4096 --data=/tmp/put$2
    done >/tmp/said$2
}
appends $n x & one=$!
appends $m y & two=$!
wait $one; wait $two
is "$(zone 0)" '32 384' 'the zone of both'; is "$(d=$e zone 0)" '32 384' 'the zone of both'
dd if=$e bs=512 count=384 iflag=direct of=/tmp/got 2>/dev/null
is $(tr -dc x </tmp/got | wc -c) 98304 'bytes of the one'
is $(tr -dc y </tmp/got | wc -c) 98304 'bytes of the other'
nvme zns reset-zone $m --start-lba=0; is "$(zone 0)" '16 0' 'the zone that the other has reset'
"#;

const RESERVED: &str = r#"
nvme resv-register $d --nrkey=1 --rrega=0
nvme resv-acquire $d --crkey=1 --rtype=1 --racqa=0
conflict() {
    if "$@" >/tmp/said 2>&1; then echo "$*: not refused"; exit 1; fi
    grep -qi conflict /tmp/said || { cat /tmp/said; exit 1; }
}
of 8 z >/tmp/put
conflict nvme zns zone-append $m --zslba=0 -z 4096 --data=/tmp/put
conflict nvme zns open-zone $m --start-lba=0
conflict nvme zns reset-zone $m --select-all
conflict nvme write $m -s 0 -c 7 -z 4096 --data=/tmp/put
is "$(d=$e zone 0)" '16 0' 'the zone that is reserved'
nvme zns zone-append $n --zslba=0 -z 4096 --data=/tmp/put
nvme resv-release $d --crkey=1 --rtype=1 --rrela=0
nvme zns zone-append $m --zslba=0 -z 4096 --data=/tmp/put
is "$(zone 0)" '32 16' 'the zone of both'
"#;
