//! What the tests ask of a vhost-user-blk export whose daemon they kill under a guest's load.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use harness::daemon::program;
use serde_json::Value;

/// Verified random reads and writes of `$d`, round after round, each on a part of its own that
/// begins at `$part` MiB, until there is a file /tmp/stop; /tmp/status has the number of rounds
/// then, or that one has failed. `each` is a command after each round.
pub fn rounds(each: &str) -> String {
    format!(
        "rm -f /tmp/stop /tmp/status
         (rounds=0
          while [ ! -e /tmp/stop ]; do
              part=$((rounds % 4 * 16))
              fio --name=r --filename=$d --ioengine=io_uring --direct=1 --rw=randrw \
                  --bsrange=4k-64k --iodepth=32 --size=16m --offset=${{part}}m \
                  --fsync=100 --verify=crc32c --verify_fatal=1 --verify_state_save=0 \
                  >/tmp/fio.log 2>&1 || {{ echo failed >/tmp/status; exit; }}
              {each}
              rounds=$((rounds + 1))
          done
          echo $rounds >/tmp/status) </dev/null >/dev/null 2>&1 &"
    )
}

/// Requests of the first export's guest that the daemon behind a control socket has carried out
/// since its start.
pub fn requests(control: &Path) -> Result<u64> {
    let output = Command::new(program()?)
        .args(["stats", "--json", "--control"])
        .arg(control)
        .output()?;
    let stats: Value = serde_json::from_slice(&output.stdout)?;
    let queues = stats["vhost_user_blk"][0]["queues"].as_array();
    Ok(queues.map_or(0, |all| {
        all.iter().filter_map(|q| q["requests"].as_u64()).sum()
    }))
}

/// Waits until the guest has made so many more.
pub fn wait_requests(control: &Path, more: u64, limit: Duration) -> Result<()> {
    let (began, before) = (Instant::now(), requests(control)?);
    while requests(control)? < before + more {
        ensure!(began.elapsed() < limit, "the guest does not work");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
