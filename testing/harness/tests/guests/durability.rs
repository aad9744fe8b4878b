//! A daemon that is killed while fio writes: every write that fio saw flushed must be in the file.
//!
//! Two fio jobs write in ascending order at queue depth 1: `flushed` sends a Flush after
//! each write, `fua` writes with O_DSYNC. fio reports its counts to the host while it runs.
//! A report of N flushed writes therefore means that the first N blocks of the job are
//! durable, and each block holds its own offset in every word, so that the host can tell a
//! missing, torn or misplaced block.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::common::{Disks, run};
use anyhow::{Context, Result, ensure};
use harness::Guest;
use harness::served::{Controller, Volumes};

const BLOCK: u64 = 4096;

/// One job: its name, the offset of its first block, and what its report counts.
struct Job {
    name: &'static str,
    start: u64,
    counts: &'static str,
}

const JOBS: [Job; 2] = [
    Job {
        name: "flushed",
        start: 16 << 20,
        counts: "sync",
    },
    Job {
        name: "fua",
        start: 128 << 20,
        counts: "write",
    },
];

/// Writes of a job.
const WRITES: u64 = (100 << 20) / BLOCK;

/// The least that must be acknowledged before the kill, so that the test means something.
const MIN_ACKNOWLEDGED: u64 = 200;

/// What a guest's kernel makes of a promise, and of none; and what this program makes of that
/// kernel's, as a server in the guest on the guest's own disk.
#[test]
fn guest_sees_atomic_write_support() -> Result<()> {
    if Controller::chosen()? == Controller::Qemu {
        return Ok(());
    }
    let disks = Disks::new()?;
    let plain = disks.sparse("plain.raw", 16)?;
    let mut volumes = Volumes::file("atomic", &plain);
    let mut atomic = disks.sparse("atomic.raw", 16)?.into_os_string();
    atomic.push("?atomic=16K");
    volumes.files.push(atomic.into());
    let served = volumes.serve()?;
    let guest = Guest::builder("atomic")
        .memory_mib(1024)
        .disk(served.disk())
        .programs(&[harness::daemon::program()?])
        .boot()?;
    let limits = |nsid: u32| {
        let script = format!(
            "q=/sys/block/$(basename $(wait_disk 1 {nsid}))/queue
             cat $q/atomic_write_max_bytes $q/atomic_write_unit_max_bytes \\
                 $q/atomic_write_boundary_bytes"
        );
        let said = run(&guest, &script)?;
        anyhow::Ok(said.split_whitespace().collect::<Vec<_>>().join(" "))
    };
    // A block is what every namespace promises.
    ensure!(limits(1)? == "512 512 0", "{}", limits(1)?);
    ensure!(limits(2)? == "16384 16384 16384", "{}", limits(2)?);
    let fields = run(
        &guest,
        "for n in 1 2; do nvme id-ns $(wait_disk 1 $n) | tr -d ' ' |
             grep -E '^(nsfeat|nawun|nawupf|nabsn|nabspf|nabo|nacwu):'; done",
    )?;
    let numbers: Vec<&str> = fields.lines().filter_map(|l| l.split(':').nth(1)).collect();
    ensure!(
        numbers[1..7] == ["0"; 6] && numbers[8..] == ["31", "31", "0", "31", "0", "31"],
        "{fields}"
    );
    // What the guest's kernel takes, and the disk does as a whole, by its journal.
    run(
        &guest,
        "d=$(wait_disk 1 2)
         for len in 512 4k 16k; do
             xfs_io -d -c \"pwrite -A -D -V 1 -S 0x5a -b $len 16k $len\" $d
         done
         dd if=$d bs=16k skip=1 count=1 iflag=direct | tr -d Z | wc -c | grep -qx 0
         ! xfs_io -d -c 'pwrite -A -D -V 1 -b 32k 32k 32k' $d",
    )?;
    // A server in the guest is told by the guest's kernel, and tells it to.
    let said = run(
        &guest,
        "export LD_LIBRARY_PATH=/tools/lib:/tmp
         /tmp/vnvme serve --sandbox off --socket /tmp/s.sock --block-size 4096 $(wait_disk 1 2) \
             >/tmp/log 2>&1 & pid=$!
         n=0; while [ ! -S /tmp/s.sock ] && [ $n -lt 300 ]; do sleep 0.1; n=$((n + 1)); done
         /tmp/vnvme bench vfio-user:///tmp/s.sock/1 --destroy-data \
             --rw randwrite --bs 8k --runtime 1 2>&1 || echo failed
         kill $pid; wait $pid; cat /tmp/log",
    )?;
    let told = said.contains("atomic writes of 512 to 8192 bytes");
    ensure!(told && !said.contains("failed"), "{said}");
    guest.poweroff()?;
    served.finish()
}

#[test]
fn flushed_data_is_in_file_after_sigkill() -> Result<()> {
    let disks = Disks::new()?;
    let file = disks.sparse("disk.raw", 256)?;
    let served = Volumes::file("durable", &file).serve()?;
    let guest = Guest::builder("durable").disk(served.disk()).boot()?;
    let jobs = format!(
        "fio --output-format=json --status-interval=1 --bs={BLOCK} --rw=write --iodepth=1 --direct=1 \
         --ioengine=psync --verify=pattern --verify_pattern=%o --do_verify=0 --size=100m --filename=$d \
         --name=flushed --offset={} --fsync=1 --name=fua --offset={} --sync=dsync",
        JOBS[0].start, JOBS[1].start
    );
    run(
        &guest,
        &format!("d=$(wait_disk 1 1); ({jobs} >&4 2>&1 &) </dev/null >/dev/null 2>&1"),
    )?;
    let reports = guest.events().wait(Duration::from_secs(120), |lines| {
        JOBS.iter()
            .all(|job| acknowledged(lines, job) >= MIN_ACKNOWLEDGED)
    })?;
    run(&guest, "pidof fio || { echo fio has ended; exit 1; }")?;
    match Controller::chosen()? {
        Controller::Vnvme => served.daemon()?.kill()?,
        Controller::Qemu => guest.kill()?,
    }
    // Reports that were on their way count too.
    let late = guest.events().all();
    drop(guest);
    let mut bytes = fs::read(&file)?;
    for job in &JOBS {
        let count = acknowledged(&late, job).max(acknowledged(&reports, job));
        eprintln!(
            "durability: {} writes of {} were acknowledged",
            count, job.name
        );
        ensure!(
            count < WRITES,
            "{} was done before the kill: nothing was cut off",
            job.name
        );
        check(&bytes, job, count)?;
        // The check itself must be able to fail: for the last acknowledged
        // block lost, and for one torn.
        let last = usize::try_from(job.start + (count - 1) * BLOCK)?;
        let kept = bytes[last..last + 512].to_vec();
        bytes[last..last + 512].fill(0);
        ensure!(
            check(&bytes, job, count).is_err(),
            "a lost block was not noticed"
        );
        bytes[last..last + 512].copy_from_slice(&kept);
        bytes[last + 4000] ^= 1;
        ensure!(
            check(&bytes, job, count).is_err(),
            "a torn block was not noticed"
        );
        bytes[last + 4000] ^= 1;
    }
    if Controller::chosen()? == Controller::Vnvme {
        after_the_crash(&file)?;
    }
    Ok(())
}

/// A new daemon takes the file that the killed one held, and a new guest reads it.
fn after_the_crash(file: &Path) -> Result<()> {
    let served = Volumes::file("durable-again", file).serve()?;
    let guest = Guest::builder("durable-again").disk(served.disk()).boot()?;
    let sum = run(
        &guest,
        "d=$(wait_disk 1 1); dd if=$d bs=1M skip=16 count=1 iflag=direct 2>/dev/null | sha256sum",
    )?;
    let bytes = fs::read(file)?;
    let part = tempfile::NamedTempFile::new()?;
    fs::write(
        part.path(),
        bytes.get(16 << 20..17 << 20).context("a short file")?,
    )?;
    let wanted = harness::cache::sha256_file(part.path())?;
    ensure!(
        sum.starts_with(&wanted),
        "the guest reads {sum}, the file holds {wanted}"
    );
    guest.poweroff()?;
    served.finish()
}

/// How many writes of a job fio has reported as durable in its latest complete report.
fn acknowledged(lines: &[String], job: &Job) -> u64 {
    let text = lines.join("\n");
    let mut latest = 0;
    // Reports follow one another, each a JSON object that starts at the beginning of a line.
    for report in text
        .split("\n{")
        .map(|r| format!("{{{}", r.trim_start_matches('{')))
    {
        let mut values =
            serde_json::Deserializer::from_str(&report).into_iter::<serde_json::Value>();
        let Some(Ok(value)) = values.next() else {
            continue;
        };
        for found in value["jobs"].as_array().into_iter().flatten() {
            if found["jobname"] == job.name {
                let count = found[job.counts]["total_ios"].as_u64().unwrap_or(0);
                latest = latest.max(count);
            }
        }
    }
    latest
}

/// Every one of the first `count` blocks of a job holds its own offset in each 64-bit word.
fn check(bytes: &[u8], job: &Job, count: u64) -> Result<()> {
    for block in 0..count {
        let offset = job.start + block * BLOCK;
        let at = usize::try_from(offset)?;
        let data = bytes
            .get(at..at + BLOCK as usize)
            .context("past the end of the file")?;
        let whole = data
            .chunks_exact(8)
            .all(|word| word == offset.to_le_bytes());
        ensure!(
            whole,
            "{}: block {block} of {count} acknowledged, at {offset:#x}, holds {:02x?}",
            job.name,
            &data[..16]
        );
    }
    Ok(())
}
