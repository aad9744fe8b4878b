//! A namespace with protection information under Linux: what its block layer makes of it, fio
//! through it and past it, and damage from below.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::{Checks, Disks, LONG_TIMEOUT, Part, run_for};
use anyhow::Result;
use harness::progress::skip;
use harness::served::Controller;
use harness::{Daemon, Disk, Guest};

/// `$d` is the disk, `$g` its character device, `$q` what the block layer says of it.
const LIB: &str = "d=$(wait_disk 1 1); n=$(basename $d); q=/sys/block/$n; g=/dev/ng${n#nvme}";

const PROTECTION: &str = "block-size=4096&metadata-size=8&protection=1";
/// The second disk has longer tuples.
const LONG_GUARD: &str = "block-size=4096&metadata-size=16&protection=1&guard=64&storage-tag=20";
/// Of the third one's storage tags, 12 bits are compared.
const TAGGED: &str =
    "block-size=4096&metadata-size=8&protection=1&storage-tag=16&storage-tag-mask=0xfff0";
/// The tuples of the fourth Linux's block layer makes and checks itself, those of the fifth it does
/// not know.
const CRC64: &str = "block-size=4096&metadata-size=16&protection=1&guard=64";
const CRC32: &str = "block-size=4096&metadata-size=16&protection=1&guard=32";

/// Of metadata alone, and of more than a page with few blocks.
const LARGE: &str = "block-size=512&metadata-size=64";

fn serve(disk: &Path, others: &[(&Path, &str)]) -> Result<Daemon> {
    let volume = |disk: &Path, protection: &str| {
        let file = disk.with_extension("metadata");
        let (disk, file) = (disk.display(), file.display());
        format!("{disk}?{protection}&metadata={file}")
    };
    let mut daemon = Daemon::builder("protection").volume(volume(disk, PROTECTION));
    for (disk, what) in others {
        daemon = daemon.volume(volume(disk, what));
    }
    daemon.start()
}

fn script(guest: &Guest, text: &str) -> Result<String> {
    run_for(guest, LONG_TIMEOUT, &format!("{LIB}\n{text}"))
}

/// Disks with protection information in a guest that others share.
pub struct Protected {
    disk: PathBuf,
    fourth: PathBuf,
    daemon: Daemon,
    _disks: Disks,
}

impl Protected {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip("protection::a_protected_disk", "the metadata is vnvme's");
            return Ok(None);
        }
        let disks = Disks::new()?;
        let disk = disks.sparse("disk.raw", 64)?;
        let second = disks.sparse("second.raw", 16)?;
        let third = disks.sparse("third.raw", 16)?;
        let (fourth, fifth) = (
            disks.sparse("fourth.raw", 64)?,
            disks.sparse("fifth.raw", 16)?,
        );
        let others: [(&Path, &str); 4] = [
            (&second, LONG_GUARD),
            (&third, TAGGED),
            (&fourth, CRC64),
            (&fifth, CRC32),
        ];
        let daemon = serve(&disk, &others)?;
        Ok(Some(Box::new(Protected {
            disk,
            fourth,
            daemon,
            _disks: disks,
        })))
    }
}

impl Part for Protected {
    fn name(&self) -> &'static str {
        "protection"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("what Linux sees", || sees(guest));
        checks.check("fio verify, with Linux's own tuples", || fio(guest));
        checks.check("fio past the block layer, with tuples of its own", || {
            past(guest)
        });
        checks.check("a wrong tag", || wrong(guest));
        checks.check("copies, with their tuples", || copies(guest));
        checks.check("storage tags", || storage(guest));
        checks.check("a guard of 64 bits", || crc64(guest));
        checks.check("formats that Linux does not know", || unknown(guest));
        checks.check("all of them after a reset", || again(guest));
        checks.check("damage below", || damage(guest, 1, &self.disk));
        checks.check("damage below, a guard of 64 bits", || {
            damage(guest, 4, &self.fourth)
        });
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

/// Linux sends SGLs of metadata from 6.13 on, where SGLS bit 19 says that it may: for commands of
/// user space, and where it has merged requests.
pub struct Pieces {
    daemon: Daemon,
    _disks: Disks,
}

impl Pieces {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            skip("protection::metadata_in_pieces", "the metadata is vnvme's");
            return Ok(None);
        }
        let disks = Disks::new()?;
        let disk = disks.sparse("disk.raw", 64)?;
        let large = disks.sparse("large.raw", 16)?;
        Ok(Some(Box::new(Pieces {
            daemon: serve(&disk, &[(&large, LARGE)])?,
            _disks: disks,
        })))
    }
}

impl Part for Pieces {
    fn name(&self) -> &'static str {
        "metadata in pieces"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.daemon.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("what Linux sees", || pieces_seen(guest));
        checks.check("merged requests", || merged(guest));
        checks.check("fio past the block layer", || past(guest));
        checks.check("metadata of several pages", || pages(guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.daemon.terminate()
    }
}

/// Segments of metadata that a request may have: one, where there are no SGLs of metadata.
fn pieces_seen(guest: &Guest) -> Result<()> {
    script(
        guest,
        "[ $(( $(nvme id-ctrl /dev/$(ctrl 1) | sed -n 's/^sgls *: //p') & 0x80000 )) = 524288 ]
         [ $(cat $q/queue/max_integrity_segments) -gt 1 ]",
    )?;
    Ok(())
}

/// Requests of many bios, each with metadata of its own: Linux makes the tuples, and the controller
/// checks them.
fn merged(guest: &Guest) -> Result<()> {
    script(
        guest,
        "dd if=/dev/urandom of=/tmp/data bs=1M count=16 2>/dev/null
         merges() { awk '{ print $2 + $6 }' $q/stat; }
         before=$(merges)
         dd if=/tmp/data of=$d bs=4k conv=fsync; echo 1 >/proc/sys/vm/drop_caches
         cmp -n 16777216 /tmp/data $d
         echo \"$(( $(merges) - before )) bios merged\"
         fio --name=merge --filename=$d --offset=16m --size=16m --direct=1 --ioengine=io_uring \
             --iodepth=64 --iodepth_batch=32 --iodepth_batch_complete_max=32 --rw=write --bs=4k \
             --verify=crc32c --output-format=terse >/tmp/fio || { cat /tmp/fio; exit 1; }
         merged=$(( $(merges) - before )); echo \"$merged bios merged\"; [ $merged -gt 0 ]",
    )?;
    Ok(())
}

/// Commands of user space with 16 KiB of metadata, which Linux describes by an SGL: else it would
/// say that nobody checks its length.
fn pages(guest: &Guest) -> Result<()> {
    script(
        guest,
        r#"d=$(wait_disk 1 2)
         head -c 131072 /dev/urandom >/tmp/data; head -c 16384 /dev/urandom >/tmp/metadata
         all='-s 1000 -c 255 -z 131072 -y 16384'
         nvme write $d $all -d /tmp/data -M /tmp/metadata
         nvme compare $d $all -d /tmp/data -M /tmp/metadata
         nvme read $d $all -d /tmp/back -M /tmp/kept
         cmp /tmp/data /tmp/back; cmp /tmp/metadata /tmp/kept
         if nvme compare $d $all -d /tmp/data -M /tmp/data >/tmp/said 2>&1; then exit 1; fi
         grep -qi compare /tmp/said
         # Metadata of fewer bytes than the blocks have.
         reads() {
             nvme io-passthru $d --opcode=2 --namespace-id=2 --read --data-len=131072 \
                 --cdw10=1000 --cdw12=255 --metadata-len=$1 >/tmp/said 2>&1
         }
         reads 16384 || { cat /tmp/said; exit 1; }
         if reads 16320; then echo "metadata of 255 blocks takes that of 256"; exit 1; fi
         grep -qiE 'metadata sgl|0x[0-9a-f]*010' /tmp/said || { cat /tmp/said; exit 1; }
         cat /tmp/said
         if dmesg | grep -i 'nvme.*unchecked'; then exit 1; fi"#,
    )?;
    Ok(())
}

fn sees(guest: &Guest) -> Result<()> {
    script(
        guest,
        "[ $(cat $q/metadata_bytes) = 8 ]
         [ $(cat $q/integrity/format) = T10-DIF-TYPE1-CRC ]
         [ $(blockdev --getsize64 $d) = 67108864 ]
         nvme id-ns $d >/tmp/id; grep -q '^dps *: 0x1$' /tmp/id
         grep -q '^mc *: 0x2$' /tmp/id; grep -q 'lbaf *0 : ms:8 *lbads:12' /tmp/id",
    )?;
    Ok(())
}

fn fio(guest: &Guest) -> Result<()> {
    script(
        guest,
        "fio --name=pi --filename=$d --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw \\
             --bsrange=4k-128k --size=32m --verify=crc32c --output-format=terse >/tmp/fio ||
             { cat /tmp/fio; exit 1; }",
    )?;
    Ok(())
}

/// Tuples that fio makes and checks, with the controller's checks on and off; and those that the
/// controller makes and takes away.
fn past(guest: &Guest) -> Result<()> {
    script(
        guest,
        "own='--pi_act=0 --md_per_io_size=256'; tag='--apptag=0x1234 --apptag_mask=0xffff'
         for pi in \"$own --pi_chk=GUARD,REFTAG,APPTAG $tag\" \"$own --pi_chk=GUARD\" \
                   '--pi_act=1 --pi_chk=GUARD,REFTAG'; do
             fio --name=past --filename=$g --ioengine=io_uring_cmd --cmd_type=nvme --iodepth=8 \
                 --rw=randwrite --bsrange=4k-128k --size=16m --verify=crc32c --do_verify=1 $pi \
                 --output-format=terse >/tmp/fio 2>&1 || { echo \"$pi\"; cat /tmp/fio; exit 1; }
         done",
    )?;
    Ok(())
}

/// What the guest says of its data is wrong: nothing is written, and the status says what is wrong.
fn wrong(guest: &Guest) -> Result<()> {
    script(
        guest,
        "block() {
             how=$1; at=$2; tag=$3; shift 3
             nvme $how $d -s $at -c 0 -z 4096 --ref-tag=$tag \"$@\"
         }
         refuses() {
             words=$1; shift
             if block \"$@\" >/tmp/said 2>&1; then echo \"$* is done\"; exit 1; fi
             grep -qi \"$words\" /tmp/said || { cat /tmp/said; exit 1; }
         }
         checked() { block $1 $2 $3 -y 8 -p 7 -d $4 -M /tmp/tuple; }
         head -c 4096 /dev/urandom >/tmp/data; head -c 4096 /dev/zero >/tmp/zeroes
         block write 12000 12000 -d /tmp/data -p 8
         same() {
             checked read 12000 12000 /tmp/back
             cmp /tmp/data /tmp/back; [ $(wc -c </tmp/tuple) = 8 ]
         }
         same
         own='-y 8 -p 7 -M /tmp/tuple -d'
         refuses 'guard' write 12000 12000 $own /tmp/zeroes
         refuses 'reference tag' write 12001 12001 $own /tmp/data
         refuses 'protection information' write 12000 12001 $own /tmp/data
         same",
    )?;
    Ok(())
}

/// What Copy checks of its source and makes or checks of its destination, on both disks.
fn copies(guest: &Guest) -> Result<()> {
    script(
        guest,
        "e=$(wait_disk 1 2)
         copies() {
             disk=$1; from=$2; to=$3; shift 3
             nvme copy $disk --slbs=$from --blocks=0 --sdlba=$to \"$@\"
         }
         refuses() {
             words=$1; shift
             if copies \"$@\" >/tmp/said 2>&1; then echo \"$* is done\"; exit 1; fi
             grep -qi \"$words\" /tmp/said || { cat /tmp/said; exit 1; }
         }
         block() {
             disk=$1; how=$2; at=$3; shift 3
             nvme $how $disk -s $at -c 0 -z 4096 --ref-tag=$at \"$@\"
         }
         anew='--prinfor=15 --prinfow=8'
         for disk in $d $e; do
             format=0; size=8; other=1
             if [ $disk = $e ]; then format=1; size=16; other=0; fi
             head -c 4096 /dev/urandom >/tmp/data
             block $disk write 1000 -d /tmp/data -p 8 --app-tag=5
             tags=\"--expected-ref-tags=1000 --expected-app-tags=5 -M 65535\"
             copies $disk 1000 1100 $anew $tags --app-tag=6 --ref-tag=1100 --format=$format
             block $disk read 1100 -y $size -p 7 -d /tmp/back -M /tmp/tuple --app-tag=6 \
                 --app-tag-mask=65535
             cmp /tmp/data /tmp/back
             refuses 'protection information' $disk 1000 1100 $anew --expected-ref-tags=1001 \
                 --ref-tag=1100 --format=$format
             refuses 'application tag' $disk 1000 1100 $anew --expected-ref-tags=1000 \
                 --expected-app-tags=6 -M 65535 --ref-tag=1100 --format=$format
             refuses 'reference tag' $disk 1000 1100 --prinfor=7 --prinfow=7 $tags --app-tag=5 \
                 -m 65535 --ref-tag=1100 --format=$format
             refuses 'invalid format' $disk 1000 1100 $anew $tags --ref-tag=1100 --format=$other
             refuses 'invalid field' $disk 1000 1100 --prinfor=8 $tags --format=$format
             block $disk read 1100 -y $size -p 7 -d /tmp/back -M /tmp/tuple --app-tag=6 \
                 --app-tag-mask=65535
             cmp /tmp/data /tmp/back
         done",
    )?;
    Ok(())
}

/// What is written with a storage tag is read, verified and compared with it, and with another one
/// only where that is not checked, or differs in bits that the mask has not.
fn storage(guest: &Guest) -> Result<()> {
    script(
        guest,
        "e=$(wait_disk 1 2); f=$(wait_disk 1 3)
         block() {
             disk=$1; how=$2; at=$3; tag=$4; shift 4
             nvme $how $disk -s $at -c 0 --ref-tag=$at --storage-tag=$tag \"$@\"
         }
         refuses() {
             if block \"$@\" >/tmp/said 2>&1; then echo \"$* is done\"; exit 1; fi
             grep -qiE 'storage tag|0x[0-9a-f]*288' /tmp/said || { cat /tmp/said; exit 1; }
         }
         head -c 4096 /dev/urandom >/tmp/data; head -c 4096 /dev/zero >/tmp/zeroes
         for disk in $e $f; do
             size=8; other=0x5a6a; near=0x5a5b
             if [ $disk = $e ]; then size=16; other=0x5a5b; near=0x5a5a; fi
             moves=\"-z 4096 -y $size -M /tmp/tuple\"; got=\"$moves -d /tmp/back\"
             own=\"$moves -d /tmp/data\"; check='-p 7 --storage-tag-check'
             block $disk write 2000 0x5a5a -z 4096 -d /tmp/data -p 8
             for tag in 0x5a5a $near; do
                 block $disk read 2000 $tag $got $check
                 cmp /tmp/data /tmp/back
                 block $disk verify 2000 $tag $check
                 block $disk compare 2000 $tag $own $check
                 block $disk write 2000 $tag $own $check
             done
             refuses $disk read 2000 $other $got $check
             refuses $disk verify 2000 $other $check
             refuses $disk compare 2000 $other $own $check
             refuses $disk write 2000 $other $own $check
             block $disk read 2000 $other $got -p 7
             cmp /tmp/data /tmp/back
             block $disk write-zeroes 2000 $other -p 8
             refuses $disk read 2000 0x5a5a $got $check
             block $disk read 2000 $other $got $check
             cmp /tmp/zeroes /tmp/back
         done",
    )?;
    Ok(())
}

/// Linux has the profile, as ELBAS says that there are such formats, and enables them by LBAFEE: it
/// makes the tuples that the controller checks, and finds what is wrong in those that it reads.
fn crc64(guest: &Guest) -> Result<()> {
    script(
        guest,
        r#"[ $(( $(nvme id-ctrl /dev/$(ctrl 1) | sed -n 's/^ctratt *: //p') & 0x8000 )) = 32768 ]
         nvme get-feature /dev/$(ctrl 1) -f 0x16 -l 512 -b | od -An -tu1 -j2 -N1 | grep -q '^ *1$'
         d=$(wait_disk 1 4); n=$(basename $d); q=/sys/block/$n
         [ $(cat $q/metadata_bytes) = 16 ]
         [ $(cat $q/integrity/format) = EXT-DIF-TYPE1-CRC64 ]
         [ $(blockdev --getsize64 $d) = 67108864 ]
         fio --name=crc64 --filename=$d --direct=1 --ioengine=libaio --iodepth=16 --rw=randrw \
             --bsrange=4k-128k --size=32m --verify=crc32c --output-format=terse >/tmp/fio ||
             { cat /tmp/fio; exit 1; }
         head -c 8192 /dev/urandom >/tmp/data
         dd if=/tmp/data of=$d bs=4096 seek=12000 oflag=direct
         tuple() {
             how=$1; at=$2; shift 2
             nvme $how $d -s $at -c 0 -z 4096 -y 16 -M /tmp/tuple --ref-tag=$at "$@"
         }
         # The controller finds Linux's tuple right.
         tuple read 12000 -p 7 -d /tmp/back
         head -c 4096 /tmp/data | cmp - /tmp/back
         [ $(wc -c </tmp/tuple) = 16 ]
         # With another block's, unchecked, Linux refuses what it reads.
         tuple write 12001 -p 0 -d /tmp/back
         dd if=$d of=/dev/null bs=4096 skip=12000 count=1 iflag=direct
         ! dd if=$d of=/dev/null bs=4096 skip=12001 count=1 iflag=direct
         if tuple write 12001 -p 7 -d /tmp/back >/tmp/said 2>&1; then exit 1; fi
         grep -qi 'protection information\|reference tag' /tmp/said || { cat /tmp/said; exit 1; }"#,
    )?;
    Ok(())
}

/// Of storage tags and of guards of 32 bits Linux has no profile: it gives metadata of zeroes,
/// which nobody checks, and reads what it wrote.
fn unknown(guest: &Guest) -> Result<()> {
    script(
        guest,
        r#"for number in 2 3 5; do
             d=$(wait_disk 1 $number); q=/sys/block/$(basename $d)
             [ $(cat $q/integrity/format) = nop ]
             [ $(blockdev --getsize64 $d) = 16777216 ]
             head -c 8192 /dev/urandom >/tmp/data
             dd if=/tmp/data of=$d bs=4096 seek=3000 oflag=direct
             dd if=$d of=/tmp/back bs=4096 skip=3000 count=2 iflag=direct
             cmp /tmp/data /tmp/back
             size=$(cat $q/metadata_bytes)
             rm -f /tmp/tuple
             nvme read $d -s 3000 -c 0 -z 4096 -y $size -M /tmp/tuple -d /tmp/back
             head -c $size /dev/zero | cmp - /tmp/tuple
         done"#,
    )?;
    Ok(())
}

/// After a reset Linux enables the formats again. (It lets nobody else disable them: 6.12 refuses
/// Set Features with Host Behavior Support from user space.)
fn again(guest: &Guest) -> Result<()> {
    script(
        guest,
        r#"nvme reset /dev/$(ctrl 1)
         d=$(wait_disk 1 1)
         nvme get-feature /dev/$(ctrl 1) -f 0x16 -l 512 -b | od -An -tu1 -j2 -N1 | grep -q '^ *1$'
         for number in 1 2 3 4 5; do
             dd if=$(wait_disk 1 $number) of=/dev/null bs=4096 count=1 iflag=direct
         done"#,
    )?;
    Ok(())
}

/// A block that is changed below cannot be read, and its neighbour can.
fn damage(guest: &Guest, number: u32, disk: &Path) -> Result<()> {
    let file = File::options().read(true).write(true).open(disk)?;
    let find = format!("d=$(wait_disk 1 {number})");
    script(
        guest,
        &format!("{find}; dd if=/dev/urandom of=$d bs=4096 seek=9000 count=2 oflag=direct"),
    )?;
    let mut block = [0; 4096];
    file.read_exact_at(&mut block, 9000 * 4096)?;
    block[100] ^= 1;
    file.write_all_at(&block, 9000 * 4096)?;
    script(
        guest,
        &format!(
            "{find}
             ! dd if=$d of=/dev/null bs=4096 skip=9000 count=1 iflag=direct
             dd if=$d of=/dev/null bs=4096 skip=9001 count=1 iflag=direct"
        ),
    )?;
    Ok(())
}
