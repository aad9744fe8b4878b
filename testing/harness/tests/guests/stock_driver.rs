//! A stock Linux guest on its stock NVMe driver: one boot, every ordinary use.

use std::fs;
use std::path::Path;

use crate::common::{Checks, Disks, LONG_TIMEOUT, Part, allocated, json, run, run_for};
use anyhow::{Context, Result, ensure};
use harness::progress::skip;
use harness::served::{Controller, ServedVolumes, Volumes};
use harness::{Disk, Guest};

const FIRST_MIB: u64 = 1024;
const SECOND_MIB: u64 = 512;

#[test]
fn linux_guest_uses_nvme_disks() -> Result<()> {
    let disks = Disks::new()?;
    let first = disks.sparse("first.raw", FIRST_MIB)?;
    let (second, third) = (
        disks.sparse("second.raw", SECOND_MIB)?,
        disks.sparse("third.raw", SECOND_MIB)?,
    );
    let locked = disks.sparse("locked.raw", 64)?;
    fs::write(&locked, vec![0x5a; 1 << 20])?;
    fs::File::options()
        .write(true)
        .open(&locked)?
        .set_len(64 << 20)?;

    // Controller 1: 512-byte blocks. Controller 2: two namespaces of 4 KiB
    // blocks. Controller 3: read-only, and like a volume of Amazon's.
    let one = Volumes::file("stock-512", &first).serve()?;
    let mut volumes = Volumes::file("stock-4k", &second);
    volumes.files.push(third.clone());
    volumes.block_size = 4096;
    let two = volumes.serve()?;
    let mut volumes = Volumes::file("stock-ro", &locked);
    volumes.read_only = true;
    let boot = disks.sparse("boot.bin", 0)?;
    fs::write(&boot, "boots ".repeat(50_000))?;
    volumes.options = vec!["--cloud".into(), "amazon:/dev/sdf".into()];
    let boot = boot.display().to_string();
    volumes.options.extend(["--boot-partition".into(), boot]);
    let three = volumes.serve()?;
    let guest = Guest::builder("stock")
        .disk(one.disk())
        .disk(two.disk())
        .disk(three.disk())
        // Lets nvme-cli map the registers, which it does for some logs, while the driver has them.
        .append("iomem=relaxed")
        .boot()?;

    let mut checks = Checks::new("stock driver");
    checks.check("identify controller", || identify_controller(&guest));
    checks.check("identify namespaces", || identify_namespaces(&guest));
    checks.check("log pages", || log_pages(&guest));
    checks.check("registers", || registers(&guest));
    checks.check("features", || features(&guest));
    checks.check("fio verify, 512-byte blocks", || {
        fio_verify(&guest, 1, 1, "512")
    });
    checks.check("fio verify, 4 KiB blocks", || {
        fio_verify(&guest, 2, 2, "4k")
    });
    checks.check("smart counters move", || smart_counts(&guest));
    checks.check("discard", || discard(&guest, &first));
    checks.check("write zeroes", || write_zeroes(&guest, &first));
    checks.check("copy", || copy(&guest));
    if Controller::chosen()? == Controller::Vnvme {
        checks.check("write uncorrectable", || write_uncorrectable(&guest));
        checks.check("subsystem reset", || subsystem_reset(&guest));
        checks.check("self-test", || self_test(&guest));
        checks.check("telemetry", || telemetry(&guest));
        checks.check("boot partitions", || boot_partitions(&guest));
        checks.check("format", || format_nvm(&guest));
        checks.check("sanitize", || sanitize(&guest));
        checks.check("persistent event log", || persistent_events(&guest));
        checks.check("device name of a cloud", || cloud(&guest));
    }
    checks.check("read-only namespace", || read_only(&guest, &locked));
    checks.check("ext4 on 512-byte blocks", || {
        filesystem(&guest, 1, 1, "ext4")
    });
    checks.check("ext4 on 4 KiB blocks", || filesystem(&guest, 2, 1, "ext4"));
    checks.check("xfs on 4 KiB blocks", || filesystem(&guest, 2, 2, "xfs"));
    checks.check("controller reset", || reset(&guest));
    checks.check("controller reset under fio", || reset_under_load(&guest));
    checks.check("unbind and bind", || rebind(&guest));
    checks.check("guest reboot", || reboot(&guest, false));
    checks.check("machine reset", || reboot(&guest, true));
    checks.check("xfs on 512-byte blocks", || filesystem(&guest, 1, 1, "xfs"));
    let finish = || -> Result<()> {
        guest.poweroff()?;
        one.finish()?;
        two.finish()?;
        three.finish()
    };
    checks.check("power off and SIGTERM", finish);
    checks.check("host sees the guest's filesystem", || host_check(&second));
    checks.finish();
    Ok(())
}

/// Linux 7.x describes the whole buffer of a passthrough command by an SGL, so that the controller
/// can tell a transfer that is longer; one that is shorter is an ordinary command.
pub struct Passthrough {
    served: ServedVolumes,
    _disks: Disks,
}

impl Passthrough {
    pub fn serve() -> Result<Option<Box<dyn Part>>> {
        if Controller::chosen()? == Controller::Qemu {
            let reason = "QEMU's controller refuses SGLs that are longer";
            skip("stock_driver::passthrough", reason);
            return Ok(None);
        }
        let disks = Disks::new()?;
        let served = Volumes::file("passthrough", disks.sparse("disk.raw", 16)?).serve()?;
        Ok(Some(Box::new(Passthrough {
            served,
            _disks: disks,
        })))
    }
}

impl Part for Passthrough {
    fn name(&self) -> &'static str {
        "passthrough"
    }

    fn disks(&self) -> Vec<Disk> {
        vec![self.served.disk()]
    }

    fn check(&mut self, guest: &Guest, checks: &mut Checks) -> Result<()> {
        checks.check("buffers of other lengths", || buffers(guest));
        Ok(())
    }

    fn end(self: Box<Self>) -> Result<()> {
        self.served.finish()
    }
}

fn buffers(guest: &Guest) -> Result<()> {
    run(
        guest,
        "d=$(wait_disk 1 1); head -c 4096 /dev/urandom >/tmp/in
         nvme io-passthru $d --opcode=1 -n 1 --write --data-len=4096 --input-file=/tmp/in --cdw10=8 --cdw12=0
         dd if=$d bs=512 skip=8 count=8 iflag=direct of=/tmp/disk 2>/dev/null
         cmp -n 512 /tmp/in /tmp/disk
         [ $(tail -c +513 /tmp/disk | tr -d '\\0' | wc -c) = 0 ] || { echo more was written; exit 1; }
         for bytes in 512 1024 4096 65536; do
             nvme io-passthru $d --opcode=2 -n 1 --read --data-len=$bytes --prefill=165 --cdw10=8 --cdw12=0 \
                 --raw-binary >/tmp/out
             [ $(wc -c </tmp/out) = $bytes ]
             cmp -n 512 /tmp/in /tmp/out
             [ $(tail -c +513 /tmp/out | tr -d '\\245' | wc -c) = 0 ] || { echo more was read; exit 1; }
         done",
    )?;
    // Here the kernel must have used an SGL: with PRPs the data would go behind the buffer.
    let refused = run(
        guest,
        "nvme io-passthru $(wait_disk 1 1) --opcode=2 -n 1 --read --data-len=512 --cdw12=7 2>&1 || true",
    )?;
    ensure!(
        refused.contains("SGL") || refused.contains("0xf"),
        "a buffer that is too short was not refused: {refused}"
    );
    Ok(())
}

fn identify_controller(guest: &Guest) -> Result<()> {
    let list = run(guest, "nvme list")?;
    ensure!(list.contains("/dev/nvme"), "nvme list:\n{list}");
    let id = json(guest, "nvme id-ctrl -o json /dev/$(ctrl 1)")?;
    let number = |name: &str| id[name].as_u64().with_context(|| format!("{name} in {id}"));
    for name in ["sn", "mn", "fr", "subnqn"] {
        ensure!(
            id[name].as_str().is_some_and(|v| !v.trim().is_empty()),
            "{name} is empty in {id}"
        );
    }
    ensure!(
        number("sqes")? == 0x66,
        "I/O submission entries are 64 bytes"
    );
    ensure!(
        number("cqes")? == 0x44,
        "I/O completion entries are 16 bytes"
    );
    ensure!(number("nn")? >= 1, "no namespaces");
    ensure!(
        number("ver")? >= 0x0001_0400,
        "an old version: {:#x}",
        number("ver")?
    );
    // NVMe Base 2.1, 5.1.13.2.1, ONCS: Compare (0), Dataset Management (2), Write Zeroes (3).
    ensure!(
        number("oncs")? & 0b1101 == 0b1101,
        "oncs {:#x}",
        number("oncs")?
    );
    if Controller::chosen()? == Controller::Vnvme {
        let mdts = number("mdts")?;
        ensure!(matches!(mdts, 0 | 8..), "mdts {mdts} is below 1 MiB");
        ensure!(number("oncs")? & 1 << 7 != 0, "Verify is not announced");
        ensure!(
            number("oacs")? & 1 << 8 != 0,
            "Doorbell Buffer Config is not announced"
        );
    }
    Ok(())
}

fn identify_namespaces(guest: &Guest) -> Result<()> {
    for (controller, nsid, block, mib) in [
        (1, 1, 512, FIRST_MIB),
        (2, 1, 4096, SECOND_MIB),
        (2, 2, 4096, SECOND_MIB),
    ] {
        let id = json(
            guest,
            &format!("nvme id-ns -o json $(disk {controller} {nsid})"),
        )?;
        let format = id["flbas"].as_u64().context("flbas")? & 0xf;
        let shift = id["lbafs"][usize::try_from(format)?]["ds"]
            .as_u64()
            .context("ds")?;
        ensure!(
            1 << shift == block,
            "blocks of {} bytes, not {block}",
            1 << shift
        );
        let blocks = id["nsze"].as_u64().context("nsze")?;
        ensure!(blocks << shift == mib << 20, "{blocks} blocks of {block}");
        let text = run(
            guest,
            &format!("d=$(disk {controller} {nsid}); blockdev --getss --getsize64 $d"),
        )?;
        ensure!(
            text.split_whitespace()
                .eq([block.to_string(), (mib << 20).to_string()]),
            "{text}"
        );
        if Controller::chosen()? == Controller::Vnvme {
            let zero = |name: &str| {
                id[name]
                    .as_str()
                    .is_none_or(|v| v.chars().all(|c| c == '0'))
            };
            ensure!(!zero("nguid") || !zero("eui64"), "no identifier: {id}");
        }
    }
    Ok(())
}

fn log_pages(guest: &Guest) -> Result<()> {
    let smart = json(guest, "nvme smart-log -o json /dev/$(ctrl 1)")?;
    ensure!(smart["critical_warning"].as_u64() == Some(0), "{smart}");
    let kelvin = smart["temperature"].as_u64().context("temperature")?;
    ensure!((273..400).contains(&kelvin), "{kelvin} K");
    run(guest, "nvme error-log -o json /dev/$(ctrl 1)")?;
    if Controller::chosen()? == Controller::Vnvme {
        run(guest, "nvme fw-log -o json /dev/$(ctrl 1)")?;
        // Without a command set nvme-cli asks for the zoned one too, which no namespace here has.
        run(guest, "nvme effects-log -o json /dev/$(ctrl 1)")?;
        run(guest, "nvme changed-ns-list-log -o json /dev/$(ctrl 1)")?;
        // A command that no controller has is refused, and leaves an entry in the error log.
        let entries = || -> Result<u64> {
            let smart = json(guest, "nvme smart-log -o json /dev/$(ctrl 1)")?;
            let count = &smart["num_err_log_entries"];
            let text = count.as_str().map(str::to_string);
            text.unwrap_or_else(|| count.to_string())
                .parse()
                .context("num_err_log_entries")
        };
        let before = entries()?;
        let refused = run(
            guest,
            "nvme admin-passthru /dev/$(ctrl 1) --opcode=0x7f 2>&1 || echo refused",
        )?;
        ensure!(
            refused.contains("refused"),
            "opcode 7Fh was accepted: {refused}"
        );
        ensure!(entries()? > before, "the error log did not grow");
    }
    Ok(())
}

fn registers(guest: &Guest) -> Result<()> {
    let registers = json(guest, "nvme show-regs -o json /dev/$(ctrl 1)")?;
    let number = |name: &str| {
        registers[name]
            .as_u64()
            .with_context(|| format!("{name} in {registers}"))
    };
    ensure!(number("vs")? >= 0x0001_0400, "VS {:#x}", number("vs")?);
    ensure!(
        number("cc")? & 1 == 1,
        "CC.EN is clear while the driver runs"
    );
    ensure!(
        number("csts")? & 0b11 == 1,
        "CSTS {:#x}: ready and not failed",
        number("csts")?
    );
    ensure!(number("asq")? != 0 && number("acq")? != 0, "{registers}");
    Ok(())
}

fn features(guest: &Guest) -> Result<()> {
    // Arbitration, power, temperature, error recovery, write cache, queues, coalescing,
    // vector, atomicity, events.
    for feature in [1, 2, 4, 5, 6, 7, 8, 9, 10, 11] {
        let namespace = if feature == 5 { "-n 1" } else { "" };
        run(
            guest,
            &format!("nvme get-feature -f {feature} {namespace} /dev/$(ctrl 1)"),
        )
        .with_context(|| format!("feature {feature}"))?;
    }
    // The driver asks for one queue pair per processor.
    let queues = run(
        guest,
        "ls -d /sys/block/$(basename $(disk 1 1))/mq/* | wc -l",
    )?;
    ensure!(
        queues.trim().parse::<u32>()? >= 2,
        "{queues} queues for 2 processors"
    );
    Ok(())
}

fn fio_verify(guest: &Guest, controller: u32, nsid: u32, smallest: &str) -> Result<()> {
    let common = "--ioengine=io_uring --direct=1 --verify=crc32c --verify_fatal=1 --verify_state_save=0 \
                  --rw=randrw --norandommap=0 --group_reporting";
    for (jobs, depth, size, sizes) in [
        (1, 1, "4m", format!("{smallest}-64k")),
        (2, 8, "8m", "4k-256k".to_string()),
        (3, 32, "16m", "4k-1m".to_string()),
    ] {
        run_for(
            guest,
            LONG_TIMEOUT,
            &format!(
                "fio --name=v --filename=$(disk {controller} {nsid}) {common} --bsrange={sizes} --numjobs={jobs} \
                 --iodepth={depth} --size={size} --offset_increment=128m --randseed={depth}"
            ),
        )
        .with_context(|| format!("{jobs} jobs, depth {depth}, {sizes}"))?;
    }
    Ok(())
}

fn smart_counts(guest: &Guest) -> Result<()> {
    let counts = || -> Result<Vec<f64>> {
        let smart = json(guest, "nvme smart-log -o json /dev/$(ctrl 1)")?;
        [
            "host_read_commands",
            "host_write_commands",
            "data_units_read",
            "data_units_written",
        ]
        .iter()
        .map(|name| {
            let value = &smart[name];
            let number = value.as_f64().or_else(|| value.as_str()?.parse().ok());
            number.with_context(|| format!("{name} in {smart}"))
        })
        .collect()
    };
    let before = counts()?;
    run(
        guest,
        "d=$(disk 1 1); dd if=/dev/zero of=$d bs=1M count=8 seek=900 oflag=direct; dd if=$d of=/dev/null bs=1M count=8 iflag=direct",
    )?;
    let after = counts()?;
    // Eight 1 MiB transfers each way, in commands of at most mdts, and 16.4
    // thousands of 512-byte units.
    for (i, least) in [8.0, 8.0, 16.0, 16.0].into_iter().enumerate() {
        ensure!(
            after[i] - before[i] >= least,
            "counter {i}: {before:?}, then {after:?}"
        );
        ensure!(
            after[i] - before[i] < 4000.0,
            "counter {i}: {before:?}, then {after:?}"
        );
    }
    Ok(())
}

const CHUNK: u64 = 16 << 20;

fn discard(guest: &Guest, file: &Path) -> Result<()> {
    run(
        guest,
        "d=$(disk 1 1)
         tr '\\0' x </dev/zero |
             dd of=$d bs=1M count=16 iflag=fullblock oflag=direct conv=fsync",
    )?;
    let full = allocated(file)?;
    ensure!(
        full >= CHUNK,
        "{full} bytes are allocated for {CHUNK} written"
    );
    run(guest, "d=$(disk 1 1); blkdiscard -o 0 -l $((16 << 20)) $d")?;
    let holed = allocated(file)?;
    ensure!(
        holed + CHUNK * 9 / 10 <= full,
        "discard left {holed} of {full} bytes allocated"
    );
    run(guest, "d=$(disk 1 1); zeroes $d 0 16")?;
    Ok(())
}

fn write_zeroes(guest: &Guest, file: &Path) -> Result<()> {
    // Data on both sides must stay.
    run(
        guest,
        "d=$(disk 1 1)
         tr '\\0' y </dev/zero | dd of=$d bs=1M count=16 iflag=fullblock oflag=direct conv=fsync
         blkdiscard -z -o $((1 << 20)) -l $((4 << 20)) $d
         dd if=$d bs=1M count=16 iflag=direct >/tmp/got
         y() { tr '\\0' y </dev/zero | dd bs=1M count=$1 iflag=fullblock 2>/dev/null; }
         { y 1; dd if=/dev/zero bs=1M count=4 2>/dev/null; y 11; } >/tmp/want
         cmp /tmp/got /tmp/want
         # Blocks 2 to 9 by the command itself; without and with deallocate.
         nvme write-zeroes -s 2 -c 7 $d
         nvme write-zeroes -s 16 -c 7 -d $d
         blockdev --flushbufs $d
         dd if=$d bs=512 count=24 iflag=direct >/tmp/got
         { tr '\\0' y </dev/zero | head -c 1024; head -c 4096 /dev/zero; tr '\\0' y </dev/zero | head -c 3072; head -c 4096 /dev/zero; } >/tmp/want
         cmp /tmp/got /tmp/want
         rm /tmp/got /tmp/want",
    )?;
    let bytes = fs::read(file)?;
    ensure!(
        bytes.get(..1024) == Some(&[b'y'; 1024][..]),
        "the file's first blocks"
    );
    ensure!(
        bytes.get(1024..5120) == Some(&[0; 4096][..]),
        "the zeroed blocks in the file"
    );
    Ok(())
}

/// Two ranges to behind one another, and what cannot be.
fn copy(guest: &Guest) -> Result<()> {
    run(
        guest,
        "d=$(disk 1 1)
         head -c 8192 /dev/urandom >/tmp/random
         dd if=/tmp/random of=$d bs=4096 oflag=direct 2>/dev/null
         nvme copy $d --sdlba=4096 --slbs=8,1 --blocks=7,2
         dd if=$d bs=512 skip=4096 count=11 iflag=direct 2>/dev/null >/tmp/got
         { tail -c 4096 /tmp/random; tail -c +513 /tmp/random | head -c 1536; } >/tmp/want
         cmp /tmp/got /tmp/want
         ! nvme copy $d --sdlba=0 --slbs=$(blockdev --getsz $d) --blocks=0 || exit 1
         dd if=$d bs=4096 count=2 iflag=direct 2>/dev/null | cmp - /tmp/random
         # From another namespace: not before the host says that it uses such descriptors (Host
         # Behavior Support), which Linux 6.12 refuses to nvme-cli by EACCES; the conformance cases
         # have the rest.
         across='--format=2 --snsids=2 --sopts=0'
         ! nvme copy $(disk 2 1) --sdlba=16 $across --slbs=5 --blocks=1 || exit 1
         rm /tmp/random /tmp/got /tmp/want",
    )?;
    Ok(())
}

/// Blocks that are marked cannot be read, by whichever command; those beside them can, and they can
/// when they are written. What is marked is told, and no medium is called bad for it.
fn write_uncorrectable(guest: &Guest) -> Result<()> {
    let status = run(
        guest,
        "d=$(disk 1 1); c=/dev/$(ctrl 1)
         media() { nvme smart-log -o json $c | tr -d ' ' | sed -n 's/^\"media_errors\"://p'; }
         before=$(media)
         head -c 16384 /dev/urandom >/tmp/random
         dd if=/tmp/random of=$d bs=4096 oflag=direct 2>/dev/null
         nvme write-uncor $d --start-block=10 --block-count=2
         ! dd if=$d of=/tmp/got bs=512 skip=11 count=1 iflag=direct 2>/tmp/said || exit 1
         # Linux's word for an error of the medium is ENODATA.
         grep -q 'No data available\\|Input/output error' /tmp/said
         ! dd if=$d of=/tmp/got bs=16384 count=1 iflag=direct 2>/dev/null || exit 1
         ! nvme verify $d --start-block=12 --block-count=0 2>/tmp/said || exit 1
         dd if=$d bs=512 count=10 iflag=direct 2>/dev/null | cmp -n 5120 - /tmp/random
         nvme get-lba-status $d -n 1 --start-lba=0 --max-dw=63 --action=0x11 --range-len=32 >/tmp/status
         nvme lba-status-log $c >/tmp/log
         # A write of one block heals that one.
         dd if=/tmp/random of=$d bs=512 seek=11 skip=11 count=1 oflag=direct 2>/dev/null
         dd if=$d bs=512 skip=11 count=1 iflag=direct 2>/dev/null >/tmp/got
         tail -c +5633 /tmp/random | cmp -n 512 - /tmp/got
         ! dd if=$d of=/tmp/got bs=512 skip=10 count=1 iflag=direct 2>/dev/null || exit 1
         nvme write-zeroes -s 10 -c 0 $d
         dd if=/tmp/random of=$d bs=4096 oflag=direct 2>/dev/null
         dd if=$d bs=4096 count=4 iflag=direct 2>/dev/null | cmp - /tmp/random
         [ \"$(media)\" = \"$before\" ]
         nvme get-lba-status $d -n 1 --start-lba=0 --max-dw=63 --action=0x11 --range-len=32 >/tmp/after
         rm /tmp/random /tmp/got
         cat /tmp/status /tmp/log; echo ---; cat /tmp/after",
    )?;
    let (marked, after) = status.split_once("---").context("two answers")?;
    // Three blocks in a range, by Write Uncorrectable; nvme-cli writes places in several ways.
    for told in [
        "(NLSD): 1",
        "Status: 0x3",
        "Estimate of Unrecoverable Logical Blocks: 3",
    ] {
        ensure!(marked.contains(told), "{told}: {marked}");
    }
    ensure!(after.contains("(NLSD): 0"), "{after}");
    Ok(())
}

/// Linux resets the controller because of an event, and not because a command has timed out.
fn subsystem_reset(guest: &Guest) -> Result<()> {
    run(
        guest,
        "d=$(disk 1 1); c=$(ctrl 1)
         head -c 4096 /dev/urandom >/tmp/random
         dd if=/tmp/random of=$d bs=4096 oflag=direct 2>/dev/null
         dmesg -c >/dev/null
         nvme subsystem-reset /dev/$c
         for try in $(seq 600); do
             dmesg | grep -q \"$c.*persistent internal error\" && break
             sleep 0.1
         done
         dmesg | grep -q \"$c.*persistent internal error\"
         dd if=$d bs=4096 count=1 iflag=direct 2>/dev/null | cmp - /tmp/random
         [ $(wait_disk 1 1) = $d ]
         ! dmesg | grep -E \"$c.*(timeout|is down)\" || exit 1
         rm /tmp/random",
    )?;
    Ok(())
}

/// The short operation, and the extended one, for which nvme-cli waits: both pass, and the newest
/// is first. Any other operation code is refused.
fn self_test(guest: &Guest) -> Result<()> {
    let log = run(
        guest,
        "c=/dev/$(ctrl 1)
         idle() {
             for try in $(seq 100); do
                 now=$(nvme get-log $c --log-id=6 --log-len=4 --raw-binary | od -An -tu1 -N1)
                 [ $now = 0 ] && return 0
                 sleep 0.1
             done
             nvme self-test-log $c; return 1
         }
         [ $(nvme id-ctrl -o json $c | tr -d ' ' | sed -n 's/^\"edstt\"://p' | tr -d ,) -ge 1 ]
         nvme device-self-test $c -n 1 -s 1
         idle
         nvme device-self-test $c -n 0xffffffff -s 2 -w >/tmp/waited
         ! nvme device-self-test $c -n 1 -s 7 2>/dev/null || exit 1
         nvme self-test-log $c -v | tee /tmp/log",
    )?;
    let values = |name: &str| -> Vec<String> {
        let lines = log.lines().filter_map(|line| line.split_once(':'));
        let named = lines.filter(|(n, _)| n.trim().eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.trim().to_owned()).collect()
    };
    let (results, codes) = (values("operation result"), values("self test code"));
    let first = |all: &[String]| -> Vec<String> {
        let words = all
            .iter()
            .filter_map(|v| v.split_whitespace().next())
            .map(|word| word.trim_start_matches("0x").to_owned());
        words.take(2).collect()
    };
    ensure!(first(&results) == ["0", "0"], "{log}");
    ensure!(first(&codes) == ["2", "1"], "{log}");
    Ok(())
}

/// What the controller says of itself is in data area 1, and another capture is another one.
fn telemetry(guest: &Guest) -> Result<()> {
    run(
        guest,
        "c=/dev/$(ctrl 1)
         capture() { nvme telemetry-log $c --output-file=/tmp/$1 --data-area=1 >/dev/null; }
         reads() { sed -n 's/^reads = //p' /tmp/$1; }
         capture before
         tail -c +513 /tmp/before | head -n 1 | grep -qx 'form = vnvme telemetry, form 1'
         grep -aq '^namespace.1 = ' /tmp/before
         dd if=$(disk 1 1) of=/dev/null bs=4096 count=32 iflag=direct 2>/dev/null
         capture after
         [ $(reads after) -ge $(($(reads before) + 32)) ]
         rm /tmp/before /tmp/after",
    )?;
    Ok(())
}

/// Both have the file, behind a header, and zeroes up to their end.
fn boot_partitions(guest: &Guest) -> Result<()> {
    run(
        guest,
        "c=/dev/$(ctrl 3)
         yes 'boots ' | tr -d '\\n' | head -c 300000 >/tmp/wanted
         head -c $((3 * 131072 - 300000)) /dev/zero >>/tmp/wanted
         for id in 0 1; do
             nvme boot-part-log $c --lsp=$id --output-file=/tmp/boot
             tail -c $((3 * 131072)) /tmp/boot | cmp - /tmp/wanted
         done
         rm /tmp/boot /tmp/wanted",
    )?;
    Ok(())
}

/// Formatting erases a namespace, and only that. What is no format is refused.
fn format_nvm(guest: &Guest) -> Result<()> {
    run(
        guest,
        "a=$(disk 2 1) b=$(disk 2 2)
         head -c 1048576 /dev/urandom >/tmp/random
         for d in $a $b; do dd if=/tmp/random of=$d bs=1M oflag=direct 2>/dev/null; done
         ! nvme format $a --lbaf=1 --force 2>/dev/null || exit 1
         ! nvme format $a --ses=2 --force 2>/dev/null || exit 1
         cmp -n 1048576 $a /tmp/random
         nvme format $a --lbaf=0 --ses=1 --force
         udevadm settle 2>/dev/null || true
         cmp -n 1048576 $a /dev/zero
         cmp -n 1048576 $b /tmp/random
         rm /tmp/random",
    )?;
    Ok(())
}

/// Each action erases all namespaces, as the log page says, and as they are then.
fn sanitize(guest: &Guest) -> Result<()> {
    run(
        guest,
        "c=/dev/$(ctrl 2) a=$(disk 2 1) b=$(disk 2 2)
         page() { nvme get-log $c --log-id=0x81 --log-len=512 --raw-binary; }
         status() { page | od -An -tu1 -j2 -N1; }
         finish() {
             for try in $(seq 600); do
                 [ $(($(status) & 7)) = 2 ] || break
                 sleep 0.1
             done
             [ $(($(status) & 7)) = 1 ]
         }
         ! nvme sanitize $c -a 4 2>/dev/null || exit 1
         nvme sanitize $c -a 3 -n 2 -i -p 0x5a5a5a5a
         finish
         [ $(status) = 17 ] # and two passes
         nvme sanitize-log $c | grep -i 'sanitize progress' | grep -q 65535
         tr '\\0' Z </dev/zero | head -c 1048576 >/tmp/pattern
         for d in $a $b; do
             dd if=$d bs=1M count=1 iflag=direct 2>/dev/null | cmp - /tmp/pattern
             last=$(($(blockdev --getsize64 $d) / 1048576 - 1))
             dd if=$d bs=1M skip=$last iflag=direct 2>/dev/null | cmp - /tmp/pattern
         done
         nvme sanitize $c -a 2
         finish
         for d in $a $b; do
             dd if=$d bs=1M count=1 iflag=direct 2>/dev/null | cmp -n 1048576 - /dev/zero
         done
         nvme sanitize $c -a 1
         rm /tmp/pattern",
    )?;
    Ok(())
}

/// What was done above is in the log.
fn persistent_events(guest: &Guest) -> Result<()> {
    let log = run(
        guest,
        "c=/dev/$(ctrl 2)
         nvme persistent-event-log $c --action=2
         ! nvme persistent-event-log $c -a 0 -l 512 2>/dev/null || exit 1
         nvme persistent-event-log $c -a 1
         ! nvme persistent-event-log $c -a 1 >/dev/null 2>&1 || exit 1
         length=$(nvme persistent-event-log $c -a 0 -l 512 -b | od -An -tu8 -j8 -N8)
         nvme persistent-event-log $c -a 0 -l $length
         nvme persistent-event-log $c --action=2",
    )?;
    let count = |name: &str| {
        let event = format!("Event Type: {name}(");
        log.lines().filter(|line| line.starts_with(&event)).count()
    };
    for (name, least) in [
        ("SMART/Health Log Snapshot Event", 1),
        ("Power-on or Reset Event", 1),
        ("Format NVM Start Event", 1),
        ("Format NVM Completion Event", 1),
        ("Sanitize Start Event", 2),
        ("Sanitize Completion Event", 2),
    ] {
        ensure!(count(name) >= least, "{name}: {} in\n{log}", count(name));
    }
    Ok(())
}

/// nvme-cli finds the device name where Amazon's images look for it.
fn cloud(guest: &Guest) -> Result<()> {
    run(
        guest,
        "c=/dev/$(ctrl 3)
         nvme amzn id-ctrl $c | grep -E '^bdev *: /dev/sdf$'
         grep -x 'Amazon Elastic Block Store *' /sys/class/nvme/$(ctrl 3)/model
         grep -x 0x1d0f /sys/bus/pci/devices/$(bdf 3)/vendor",
    )?;
    Ok(())
}

fn read_only(guest: &Guest, file: &Path) -> Result<()> {
    let before = harness::cache::sha256_file(file)?;
    let text = run(
        guest,
        "d=$(disk 3 1)
         [ \"$(dd if=$d bs=1 count=4 2>/dev/null)\" = ZZZZ ] && echo readable
         dd if=/dev/zero of=$d bs=4096 count=1 oflag=direct 2>&1 || echo 'block layer refused'
         head -c 512 /dev/zero >/tmp/zero
         nvme write -s 0 -c 0 -z 512 -d /tmp/zero $d 2>&1 || echo 'controller refused'
         nvme write-zeroes -s 0 -c 0 $d 2>&1 || echo 'zeroes refused'
         nvme dsm -s 0 -b 8 -d 1 $d 2>&1 || echo 'dsm refused'
         [ \"$(dd if=$d bs=1 count=4 2>/dev/null)\" = ZZZZ ] && echo 'still readable'",
    )?;
    let needs: &[&str] = match Controller::chosen()? {
        Controller::Vnvme => &[
            "readable",
            "block layer refused",
            "controller refused",
            "zeroes refused",
            "dsm refused",
            "still readable",
        ],
        // QEMU's does not announce write protection, so Linux does not know;
        // and it takes a deallocate.
        Controller::Qemu => &["readable", "controller refused", "still readable"],
    };
    for need in needs {
        // The whole line: one of them is the end of another.
        ensure!(
            text.lines().any(|line| line == *need),
            "no {need:?} in:\n{text}"
        );
    }
    ensure!(
        before == harness::cache::sha256_file(file)?,
        "the file changed"
    );
    Ok(())
}

fn filesystem(guest: &Guest, controller: u32, nsid: u32, kind: &str) -> Result<()> {
    let (make, fsck) = match kind {
        "xfs" => ("modprobe xfs; mkfs.xfs -q -f", "xfs_repair -n"),
        _ => ("mkfs.ext4 -q -F", "e2fsck -f -n"),
    };
    run_for(
        guest,
        LONG_TIMEOUT,
        &format!(
            "d=$(disk {controller} {nsid})
             {make} $d
             mount -t {kind} $d /mnt
             cp -a /tools/share/locale /tools/share/man /mnt/
             (cd /mnt && find . -type f -exec sha256sum {{}} + >/tmp/sums)
             [ $(wc -l </tmp/sums) -gt 100 ]
             # What is deleted and written again moves the data about.
             rm -r /mnt/man && cp -a /tools/share/man /mnt/
             umount /mnt
             {fsck} $d >/tmp/fsck 2>&1 || {{ cat /tmp/fsck; exit 1; }}
             mount -t {kind} -o ro $d /mnt
             (cd /mnt && sha256sum -c /tmp/sums >/tmp/checked) || {{ grep -v OK /tmp/checked; exit 1; }}
             (cd /tools/share && sha256sum -c /tmp/sums >/dev/null)
             umount /mnt"
        ),
    )?;
    Ok(())
}

/// Writes random data, does `action`, and reads it back on whatever name the device has then.
fn survives(guest: &Guest, action: &str) -> Result<()> {
    run_for(
        guest,
        LONG_TIMEOUT,
        &format!(
            "d=$(wait_disk 1 1)
             dd if=/dev/urandom of=/tmp/random bs=1M count=8 2>/dev/null
             dd if=/tmp/random of=$d bs=1M seek=64 oflag=direct conv=fsync 2>/dev/null
             {action}
             d=$(wait_disk 1 1)
             dd if=$d bs=1M skip=64 count=8 iflag=direct 2>/dev/null | cmp - /tmp/random
             rm /tmp/random"
        ),
    )?;
    Ok(())
}

fn reset(guest: &Guest) -> Result<()> {
    survives(
        guest,
        "for n in 1 2 3; do nvme reset /dev/$(ctrl 1); wait_disk 1 1 >/dev/null; done",
    )
}

fn reset_under_load(guest: &Guest) -> Result<()> {
    run_for(
        guest,
        LONG_TIMEOUT,
        "d=$(wait_disk 1 1)
         rm -f /tmp/stop
         (while [ ! -e /tmp/stop ]; do
              fio --name=r --filename=$d --ioengine=io_uring --direct=1 --rw=randrw --bsrange=4k-128k --iodepth=16 \
                  --size=24m --verify=crc32c --verify_fatal=1 --verify_state_save=0 \
                  --numjobs=2 --offset_increment=128m >/tmp/fio 2>&1 || exit 1
          done) </dev/null >/dev/null 2>&1 &
         pid=$!
         sleep 1
         for reset in 1 2 3 4 5; do
             nvme reset /dev/$(ctrl 1)
             wait_disk 1 1 >/dev/null
             sleep 0.3
         done
         touch /tmp/stop
         wait $pid || { cat /tmp/fio; exit 1; }",
    )?;
    Ok(())
}

fn rebind(guest: &Guest) -> Result<()> {
    survives(
        guest,
        "b=$(bdf 1)
         for n in 1 2; do
             echo $b >/sys/bus/pci/drivers/nvme/unbind
             [ ! -e $d ]
             echo $b >/sys/bus/pci/drivers/nvme/bind
             wait_disk 1 1 >/dev/null
         done",
    )
}

fn reboot(guest: &Guest, hard: bool) -> Result<()> {
    let write = "d=$(wait_disk 1 1); head -c $((4 << 20)) /dev/urandom >/tmp/r
         dd if=/tmp/r of=$d bs=1M seek=32 oflag=direct conv=fsync 2>/dev/null; sha256sum </tmp/r";
    let wanted = run(guest, write)?;
    if hard {
        guest.hard_reset()?;
    } else {
        guest.reboot()?;
    }
    let found = run(
        guest,
        "d=$(wait_disk 1 1); dd if=$d bs=1M skip=32 count=4 iflag=direct 2>/dev/null | sha256sum",
    )?;
    ensure!(
        wanted == found,
        "before the reboot {wanted}, after it {found}"
    );
    Ok(())
}

fn host_check(file: &Path) -> Result<()> {
    let image = harness::image::Image::get(&harness::Cache::open()?)?;
    image
        .tree
        .run("e2fsck", &["-f", "-n", &file.display().to_string()])?;
    Ok(())
}
