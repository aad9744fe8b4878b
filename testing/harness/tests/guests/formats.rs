//! `nvme format` in a Linux guest: blocks of another size, and with metadata and protection
//! information, which the block layer takes over, and which are there in the next process.

use std::path::{Path, PathBuf};

use crate::common::{Checks, Disks, LONG_TIMEOUT, Part, in_two_guests, run_for};
use crate::namespaces::Namespaces;
use anyhow::Result;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Disk, Guest};

/// `$d` is the disk. `has N` waits until it has blocks of N bytes, and looks at its size.
const LIB: &str = r#"
d=$(wait_disk 1 1); n=$(basename $d)
has() {
    for try in $(seq 100); do
        [ $(blockdev --getss $d) = $1 ] && break
        sleep 0.1
    done
    [ $(blockdev --getss $d) = $1 ]
    [ $(blockdev --getsize64 $d) = 67108864 ]
    [ $(cat /sys/block/$n/queue/logical_block_size) = $1 ]
    nvme id-ns $d >/tmp/id
    grep -q "^nsze *: $(printf 0x%x $((67108864 / $1)))\$" /tmp/id || { cat /tmp/id; exit 1; }
}
verify() {
    fio --name=formats --filename=$d --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw \
        --bsrange=$1-64k --size=32m --verify=crc32c --output-format=terse \
        >/tmp/fio || { cat /tmp/fio; exit 1; }
}
"#;

fn serve(disk: &Path) -> Result<Daemon> {
    let file = disk.with_extension("format");
    let volume = format!("{}?format-file={}", disk.display(), file.display());
    Daemon::builder("formats").volume(volume).start()
}

fn script(guest: &Guest, text: &str) -> Result<String> {
    run_for(guest, LONG_TIMEOUT, &format!("{LIB}\n{text}"))
}

/// Disks with settings chosen by a guest, which the next guest finds at the next process.
#[test]
fn choices_of_a_guest_outlive_guest_and_daemon() -> Result<()> {
    let builder = || Guest::builder("formats");
    let parts = [Blocks::serve()?, Metadata::serve()?, Namespaces::serve()?];
    in_two_guests(builder, parts)
}

struct Blocks {
    daemon: Daemon,
    disk: PathBuf,
    _disks: Disks,
}

impl Blocks {
    fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip(
                "formats::a_guest_chooses_the_blocks_of_its_disk",
                "what is tried is where vnvme keeps the format",
            );
            return Ok(None);
        }
        let disks = Disks::new()?;
        let disk = disks.sparse("disk.raw", 64)?;
        Ok(Some(Box::new(Blocks {
            daemon: serve(&disk)?,
            disk,
            _disks: disks,
        })))
    }
}

impl Part for Blocks {
    fn name(&self) -> &'static str {
        "formats"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("two formats, blocks of 512 bytes", || first(guest));
        checks.check(
            "format --lbaf=1: blocks of 4096 bytes, and all zeroes",
            || to_4096(guest),
        );
        checks.check("format --lbaf=0: back, beside what is written", || {
            under_load(guest)
        });
        checks.check("formats that there are not", || wrong(guest));
        checks.check("a file system with the larger blocks", || stays(guest));
        Ok(())
    }

    fn restart(&mut self) -> Result<()> {
        self.daemon.terminate()?;
        self.daemon = serve(&self.disk)?;
        Ok(())
    }

    fn check_again(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("after a restart", || after_restart(guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

fn first(guest: &Guest) -> Result<()> {
    script(
        guest,
        "has 512
         grep -q 'lbaf *0 : ms:0 *lbads:9 .*in use' /tmp/id
         grep -q 'lbaf *1 : ms:0 *lbads:12' /tmp/id
         ! grep -q 'lbaf *2' /tmp/id || exit 1
         verify 512",
    )?;
    Ok(())
}

fn to_4096(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme format $d --lbaf=1 --force
         has 4096
         grep -q 'lbaf *1 : ms:0 *lbads:12 .*in use' /tmp/id
         zeroes $d 0 64
         ! fio --name=small --filename=$d --direct=1 --ioengine=libaio --rw=write --bs=512 \\
             --size=64k >/dev/null 2>&1 || exit 1
         verify 4k",
    )?;
    Ok(())
}

/// What fio has in flight ends before, or with an error that the kernel repeats or tells of.
fn under_load(guest: &Guest) -> Result<()> {
    script(
        guest,
        "fio --name=load --filename=$d --direct=1 --ioengine=libaio --iodepth=32 --rw=randwrite \\
             --bs=4k --time_based --runtime=20 --size=64m --continue_on_error=all \\
             --output-format=terse >/tmp/load 2>&1 &
         load=$!
         sleep 2
         nvme format $d --lbaf=0 --force
         kill -INT $load || true; wait $load || true
         has 512
         nvme format $d --lbaf=0 --force
         zeroes $d 0 64
         verify 512",
    )?;
    Ok(())
}

fn wrong(guest: &Guest) -> Result<()> {
    script(
        guest,
        "dd if=/dev/urandom of=/tmp/random bs=1M count=1 2>/dev/null
         dd if=/tmp/random of=$d bs=1M oflag=direct 2>/dev/null
         for lbaf in 2 15 16; do
             ! nvme format $d --lbaf=$lbaf --force 2>/dev/null || exit 1
         done
         has 512
         cmp -n 1048576 $d /tmp/random",
    )?;
    Ok(())
}

fn stays(guest: &Guest) -> Result<()> {
    script(
        guest,
        "nvme format $d --lbaf=1 --force
         has 4096
         mkfs.ext4 -q $d; mount $d /mnt
         dd if=/dev/urandom of=/mnt/file bs=1M count=8 2>/dev/null
         (cd /mnt; sha256sum file >sum); umount /mnt",
    )?;
    Ok(())
}

fn after_restart(guest: &Guest) -> Result<()> {
    script(
        guest,
        "has 4096
         mount $d /mnt; cd /mnt; sha256sum -c sum; cd /; umount /mnt
         nvme format $d --lbaf=0 --force
         has 512",
    )?;
    Ok(())
}

// ---- with metadata

/// `protected TYPE BYTES` looks at what Linux makes of the metadata: its block layer makes and
/// checks tuples. `block HOW LBA` is a command on one block.
const METADATA: &str = r#"
q=/sys/block/$n; c=/dev/${n%n*}
protected() {
    for try in $(seq 100); do
        [ "$(cat $q/integrity/format)" = $1 ] && break
        sleep 0.1
    done
    [ "$(cat $q/integrity/format)" = $1 ] || { cat $q/integrity/format; exit 1; }
    [ "$(cat $q/metadata_bytes)" = $2 ]
}
block() {
    how=$1; at=$2; shift 2
    nvme $how $d -s $at -c 0 -z $(blockdev --getss $d) --ref-tag=$at "$@"
}
refuses() {
    words=$1; shift
    if "$@" >/tmp/said 2>&1; then echo "$* is done"; exit 1; fi
    grep -qi "$words" /tmp/said || { cat /tmp/said; exit 1; }
}
"#;

fn serve_metadata(disk: &Path) -> Result<Daemon> {
    let file = |name: &str| disk.with_extension(name).display().to_string();
    let (format, metadata) = (file("format"), file("metadata"));
    let volume = format!(
        "{}?format-file={format}&metadata={metadata}",
        disk.display()
    );
    Daemon::builder("formats").volume(volume).start()
}

fn script_metadata(guest: &Guest, text: &str) -> Result<String> {
    script(guest, &format!("{METADATA}\n{text}"))
}

struct Metadata {
    daemon: Daemon,
    disk: PathBuf,
    _disks: Disks,
}

impl Metadata {
    fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip(
                "formats::a_guest_chooses_metadata_and_protection",
                "what is tried is where vnvme keeps the format and the metadata",
            );
            return Ok(None);
        }
        let disks = Disks::new()?;
        let disk = disks.sparse("disk.raw", 64)?;
        Ok(Some(Box::new(Metadata {
            daemon: serve_metadata(&disk)?,
            disk,
            _disks: disks,
        })))
    }
}

impl Part for Metadata {
    fn name(&self) -> &'static str {
        "formats with metadata"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("twelve formats, blocks without metadata", || twelve(guest));
        checks.check(
            "format --lbaf=5 --pi=1: Linux makes and checks tuples",
            || to_type_1(guest),
        );
        checks.check("format --lbaf=6 --pi=3 --pil=1, and others", || {
            to_others(guest)
        });
        checks.check("what cannot be has Invalid Format", || wrong_pi(guest));
        checks.check("format --lbaf=2 --pi=1, with data", || with_data(guest));
        Ok(())
    }

    /// The process is killed: the next one has the format, and each block its tuple.
    fn restart(&mut self) -> Result<()> {
        self.daemon.kill()?;
        self.daemon = serve_metadata(&self.disk)?;
        Ok(())
    }

    fn check_again(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("after a kill", || after_kill(guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

fn twelve(guest: &Guest) -> Result<()> {
    script_metadata(
        guest,
        "has 512
         grep -q 'lbaf *0 : ms:0 *lbads:9 .*in use' /tmp/id
         grep -q 'lbaf *5 : ms:8 *lbads:12' /tmp/id
         grep -q 'lbaf *11 : ms:64 *lbads:12' /tmp/id
         grep -q '^mc *: 0x3$' /tmp/id; grep -q '^dpc *: 0x1f$' /tmp/id
         grep -q '^dps *: 0$' /tmp/id
         dd if=/dev/urandom of=$d bs=1M count=8 oflag=direct 2>/dev/null
         verify 512",
    )?;
    Ok(())
}

fn to_type_1(guest: &Guest) -> Result<()> {
    script_metadata(
        guest,
        "nvme format $d --lbaf=5 --pi=1 --ms=0 --force
         has 4096; protected T10-DIF-TYPE1-CRC 8
         grep -q 'lbaf *5 : ms:8 *lbads:12 .*in use' /tmp/id; grep -q '^dps *: 0x1$' /tmp/id
         zeroes $d 0 64
         block read 3 -y 8 -p 0 -d /tmp/back -M /tmp/tuple
         printf '\\377\\377\\377\\377\\377\\377\\377\\377' | cmp - /tmp/tuple
         head -c 4096 /dev/urandom >/tmp/data; head -c 4096 /dev/zero >/tmp/zeroes
         block write 12000 -d /tmp/data -p 8
         block read 12000 -y 8 -p 7 -d /tmp/back -M /tmp/tuple
         cmp /tmp/data /tmp/back
         refuses guard block write 12000 -y 8 -p 7 -d /tmp/zeroes -M /tmp/tuple
         block read 12000 -y 8 -p 7 -d /tmp/back -M /tmp/tuple
         cmp /tmp/data /tmp/back
         verify 4k",
    )?;
    Ok(())
}

fn to_others(guest: &Guest) -> Result<()> {
    script_metadata(
        guest,
        "nvme format $d --lbaf=6 --pi=3 --pil=1 --ms=0 --force
         has 4096
         grep -q 'lbaf *6 : ms:16 *lbads:12 .*in use' /tmp/id; grep -q '^dps *: 0xb$' /tmp/id
         block read 12000 -y 16 -p 0 -d /tmp/back -M /tmp/tuple; cmp /tmp/zeroes /tmp/back
         block write 12000 -y 16 -p 8 -d /tmp/data -M /tmp/tuple
         block read 12000 -y 16 -p 4 -d /tmp/back -M /tmp/tuple; cmp /tmp/data /tmp/back
         nvme format $c --namespace-id=1 --lbaf=5 --pi=1 --ms=1 --force
         nvme id-ns $c -n 1 >/tmp/id; grep -q '^flbas *: 0x15$' /tmp/id
         nvme format $c --namespace-id=1 --lbaf=3 --force
         has 512; grep -q 'lbaf *3 : ms:16 *lbads:9 .*in use' /tmp/id
         grep -q '^dps *: 0$' /tmp/id
         nvme format $d --lbaf=1 --force
         has 4096; grep -q 'lbaf *1 : ms:0 *lbads:12 .*in use' /tmp/id
         zeroes $d 0 64
         verify 4k",
    )?;
    Ok(())
}

fn wrong_pi(guest: &Guest) -> Result<()> {
    script_metadata(
        guest,
        "nvme format $d --lbaf=1 --force
         dd if=/tmp/data of=$d bs=4096 oflag=direct 2>/dev/null
         refuses 'format' nvme format $d --lbaf=1 --pi=1 --force
         refuses 'format' nvme format $d --lbaf=12 --pi=1 --force
         refuses 'format' nvme format $d --lbaf=15 --force
         has 4096
         cmp -n 4096 $d /tmp/data",
    )?;
    Ok(())
}

fn with_data(guest: &Guest) -> Result<()> {
    script_metadata(
        guest,
        "nvme format $d --lbaf=2 --pi=1 --force
         has 512; protected T10-DIF-TYPE1-CRC 8
         zeroes $d 0 64
         mkfs.ext4 -q $d; mount $d /mnt
         dd if=/dev/urandom of=/mnt/file bs=1M count=8 2>/dev/null
         (cd /mnt; sha256sum file >sum); umount /mnt",
    )?;
    Ok(())
}

fn after_kill(guest: &Guest) -> Result<()> {
    script_metadata(
        guest,
        "has 512; protected T10-DIF-TYPE1-CRC 8
         grep -q 'lbaf *2 : ms:8 *lbads:9 .*in use' /tmp/id; grep -q '^dps *: 0x1$' /tmp/id
         mount $d /mnt; cd /mnt; sha256sum -c sum; cd /; umount /mnt
         nvme format $d --lbaf=0 --force
         has 512; zeroes $d 0 64
         grep -q '^dps *: 0$' /tmp/id",
    )?;
    Ok(())
}
