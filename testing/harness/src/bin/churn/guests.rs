//! Neighbours that are guests: Linux drives the disk, and fio verifies it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use harness::Guest;

use super::{NEIGHBOURS, REQUEST_TIMEOUT};

/// A guest's I/Os in a second.
const RATE: usize = 200;
/// A boot, where everything else is busy.
const BOOT: Duration = Duration::from_secs(300);
/// Longest life of a guest.
const LIFE: Duration = Duration::from_secs(1800);

/// A guest for each of the neighbours' disks.
pub fn boot(dir: &Path) -> Result<Vec<Guest>> {
    let boot = |name: &str| {
        Guest::builder(&format!("churn-{name}"))
            .vfio_user(dir.join(name))
            .boot_limit(BOOT)
            .limit(LIFE)
            .boot()
    };
    NEIGHBOURS.into_iter().map(boot).collect()
}

/// Runs fio, which writes at random for `seconds`, one I/O at a time, and verifies the data.
/// Returns the times of its I/Os, in microseconds; an error if it read something wrong.
pub fn load(guest: &Guest, seconds: usize) -> Result<Vec<f64>> {
    let script = format!(
        "d=/dev/nvme0n1
         for try in $(seq 300); do [ -b $d ] && break; sleep 0.1; done
         rm -f /tmp/io_*
         fio --name=v --filename=$d --ioengine=psync --direct=1 --rw=randrw --bs=4k \\
             --rate_iops={rate},{rate} --time_based --runtime={seconds} --verify=crc32c \\
             --verify_fatal=1 --verify_state_save=0 --write_lat_log=/tmp/io >/tmp/fio 2>&1 ||
             {{ cat /tmp/fio; exit 1; }}
         cat /tmp/io_lat.1.log",
        rate = RATE / 2
    );
    let limit = REQUEST_TIMEOUT + Duration::from_secs(3 * seconds as u64);
    let log = guest.run_for(limit, &script)?;
    // Milliseconds since the start, duration in nanoseconds, and kind of the I/O.
    let time = |line: &str| {
        let field = line.split(',').nth(1).context("a line of fio's log")?;
        Ok(field.trim().parse::<f64>()? / 1e3)
    };
    let times: Vec<f64> = log.lines().map(time).collect::<Result<_>>()?;
    ensure!(!times.is_empty(), "fio did nothing");
    Ok(times)
}
