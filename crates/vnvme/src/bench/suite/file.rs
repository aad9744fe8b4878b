//! Suite `file`: a file behind a controller, and the same file straight through io_uring.

use super::super::device::DeviceTarget;
use super::super::job::{Job, Rw};
use super::super::load;
use super::super::results::Case;
use super::super::uring::UringTarget;
use super::server::{Serve, Server};
use super::{Cores, Outcome, Plan};
use anyhow::{Context, Result};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

const SUITE: &str = "file";
const DEPTHS: [u16; 3] = [1, 8, 32];
const SIZE: u64 = 512 << 20;
/// `TMPFS_MAGIC`, statfs(2).
const TMPFS: i64 = 0x0102_1994;

struct Medium {
    word: &'static str,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

pub fn run(plan: &Plan) -> Result<Outcome> {
    let cores = Cores::pair()?;
    let mut outcome = Outcome::default();
    let mut media = Vec::new();
    for (word, dir, wants_tmpfs) in [
        ("tmpfs", Path::new("/dev/shm"), true),
        ("disk", plan.output.as_path(), false),
    ] {
        match medium(word, dir, wants_tmpfs) {
            Ok(medium) => media.push(medium),
            Err(error) => outcome.leave_out(word, format!("{error:#}")),
        }
    }
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for medium in &media {
            for rw in [Rw::RandRead, Rw::RandWrite] {
                for depth in DEPTHS {
                    for way in ["bare", "vnvme"] {
                        let job = Job {
                            rw,
                            ..plan.job(depth, &cores.client)
                        };
                        let measured = match way {
                            "bare" => {
                                let target = UringTarget::open(&medium.path, rw.writes())?;
                                load::run(&target, &job, &mut ())?
                            }
                            _ => {
                                let volume = medium.path.display().to_string();
                                let cpus = cores.server.get(..1).unwrap_or_default();
                                let server = Server::start(&Serve::one(&volume, false, cpus))?;
                                let target = DeviceTarget::open(&server.url(0), &job)?;
                                load::run(&target, &job, &mut ())?
                            }
                        };
                        let case = format!("{} {way} {}", rw.word(), medium.word);
                        let case = Case {
                            suite: SUITE,
                            case: &case,
                            depth: depth.into(),
                            queues: 1,
                        };
                        let both = measured.both();
                        let c = &mut outcome.collector;
                        c.add(case, "iops", "1/s", measured.iops());
                        c.add(case, "p50_ns", "ns", both.percentile(50.0) as f64);
                        c.add(case, "p99_ns", "ns", both.percentile(99.0) as f64);
                    }
                }
            }
        }
    }
    Ok(outcome)
}

/// A file full of data, not of holes, where the word says.
fn medium(word: &'static str, dir: &Path, wants_tmpfs: bool) -> Result<Medium> {
    let statfs = rustix::fs::statfs(dir).with_context(|| format!("{}", dir.display()))?;
    let is_tmpfs = statfs.f_type as i64 == TMPFS;
    anyhow::ensure!(
        is_tmpfs == wants_tmpfs,
        "{} is {}on a tmpfs",
        dir.display(),
        if is_tmpfs { "" } else { "not " }
    );
    let free = statfs.f_bavail.saturating_mul(statfs.f_bsize as u64);
    anyhow::ensure!(
        free > 2 * SIZE,
        "{} has less than {} MiB free",
        dir.display(),
        SIZE >> 19
    );
    let temp = tempfile::Builder::new()
        .prefix("vnvme-bench-")
        .tempdir_in(dir)?;
    let path = temp.path().join("disk.raw");
    let mut file = File::create(&path)?;
    let mut chunk = vec![0; 1 << 20];
    for offset in (0..SIZE).step_by(chunk.len()) {
        super::super::pattern::fill(&mut chunk, offset, 1);
        file.write_all(&chunk)?;
    }
    file.sync_all()?;
    Ok(Medium {
        word,
        path: std::fs::canonicalize(path)?,
        _dir: temp,
    })
}
