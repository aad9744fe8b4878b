//! A daemon that is killed while fio writes: every write that fio saw flushed must be in the file.
//!
//! Two fio jobs write in ascending order at queue depth 1: `flushed` sends a Flush after
//! each write, `fua` writes with O_DSYNC. fio reports its counts to the host while it runs.
//! A report of N flushed writes therefore means that the first N blocks of the job are
//! durable, and each block holds its own offset in every word, so that the host can tell a
//! missing, torn or misplaced block.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test fails by a panic.
#![allow(clippy::indexing_slicing, clippy::panic)]

mod common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use common::{Disks, run};
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
const ENOUGH: u64 = 200;

#[test]
fn what_fio_saw_flushed_is_in_the_file_after_sigkill() -> Result<()> {
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
        JOBS.iter().all(|job| acknowledged(lines, job) >= ENOUGH)
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
