//! Suite `image`: qcow2 images, served by vnvme and by qemu-storage-daemon as vhost-user-blk
//! exports to the same client.
//!
//! Each server has an image of its own, made by the same commands, because each locks its image.
//! The servers take turns, slice by slice, on the same CPU.

use super::qsd::{QSD, Qsd, Start};
use super::scratch::Scratch;
use super::server::{Server, ServerConfig};
use super::{Cores, Plan, SuiteResults};
use crate::results::Case;
use anyhow::{Context, Result, ensure};
use load::NothingEnded;
use load::job::{Job, Rw};
use load::stats::Measured;
use load::virtio::VirtioTarget;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const SUITE: &str = "image";
const DEPTHS: [u16; 3] = [1, 8, 32];
/// Size of a full image in bytes.
const FULL: u64 = 512 << 20;
/// Virtual size of an image that is filled during the measurement.
const EMPTY: &str = "32G";
const SLICES: u32 = 10;

/// A kind of image and its load.
struct Kind {
    word: &'static str,
    what: &'static str,
    jobs: &'static [Rw],
}

const KINDS: [Kind; 5] = [
    Kind {
        word: "filled",
        what: "every cluster is there",
        jobs: &[Rw::RandRead, Rw::RandWrite],
    },
    Kind {
        word: "chain",
        what: "a full image behind three that have an eighth of it each",
        jobs: &[Rw::RandRead],
    },
    Kind {
        word: "empty",
        what: "nearly every write allocates a cluster",
        jobs: &[Rw::RandWrite],
    },
    Kind {
        word: "overlay",
        what: "nearly every write is a cluster's first, over a backing file of holes",
        jobs: &[Rw::RandWrite],
    },
    Kind {
        word: "copy",
        what: "most writes copy a cluster of data from the backing file",
        jobs: &[Rw::RandWrite],
    },
];

/// Refuses words that select no cases.
pub fn check_only(only: &[String]) -> Result<()> {
    for word in only {
        ensure!(
            KINDS.iter().any(|kind| kind.word == word)
                || DEPTHS.iter().any(|depth| depth.to_string() == *word)
                || KINDS
                    .iter()
                    .flat_map(|kind| kind.jobs)
                    .any(|rw| rw.word() == word),
            "--only {word}: the suite image has no such cases"
        );
    }
    Ok(())
}

pub fn run(plan: &Plan) -> Result<SuiteResults> {
    let cores = Cores::pair()?;
    let mut outcome = SuiteResults::default();
    let qsd = plan.qsd.as_deref().unwrap_or(Path::new(QSD));
    for program in [qsd, Path::new("qemu-img"), Path::new("qemu-io")] {
        let found = Command::new(program).arg("--version").output();
        if let Err(error) = found {
            outcome.leave_out(
                "the suite",
                format!("{}: {error} (package qemu-utils)", program.display()),
            );
            return Ok(outcome);
        }
    }
    let words = KINDS.map(|kind| kind.word);
    let kinds = plan.chosen(&words);
    let depths = DEPTHS.map(|depth| depth.to_string());
    let depths = plan.chosen(&depths.each_ref().map(String::as_str));
    let directions = plan.chosen(&[Rw::RandRead, Rw::RandWrite].map(Rw::word));
    for run in 0..plan.runs {
        eprintln!("  run {} of {}", run + 1, plan.runs);
        for kind in KINDS.iter().filter(|kind| kinds.contains(&kind.word)) {
            let jobs = kind
                .jobs
                .iter()
                .filter(|rw| directions.contains(&rw.word()));
            for &rw in jobs {
                let chosen = |depth: &u16| depths.contains(&depth.to_string().as_str());
                for depth in DEPTHS.into_iter().filter(chosen) {
                    let sides = Sides::make(plan, kind, &cores)?;
                    sides.measure(plan, &mut outcome, kind, rw, depth, &cores)?;
                }
            }
        }
    }
    for kind in &KINDS {
        eprintln!("  {}: {}", kind.word, kind.what);
    }
    Ok(outcome)
}

/// The two servers with their images, and a vnvme server of a raw file, for the cost of a disk that
/// is not an image.
struct Sides {
    // Before the files that they have open.
    vnvme: Server,
    raw: Server,
    qsd: Qsd,
    _dir: Scratch,
}

impl Sides {
    fn make(plan: &Plan, kind: &Kind, cores: &Cores) -> Result<Self> {
        let dir = Scratch::new_in(&plan.output)?;
        let root = dir.path().canonicalize()?;
        let (ours, theirs) = (root.join("vnvme"), root.join("qsd"));
        for side in [&ours, &theirs] {
            std::fs::create_dir(side)?;
        }
        let ours = make(kind, &ours)?;
        let theirs = make(kind, &theirs)?;
        let cpus = cores.server.get(..1).unwrap_or_default();
        let backing = ours.parent().unwrap_or(&ours).display();
        let volume = format!("qcow2://{}?backing={backing}", ours.display());
        let serve = |volume: String| {
            let serve = ServerConfig {
                volumes: Vec::new(),
                exports: vec![volume],
                ..ServerConfig::one("", false, cpus)
            };
            Server::start(&plan.vnvme, &serve)
        };
        let raw = root.join("raw");
        full(&raw)?;
        let vnvme = serve(volume)?;
        let raw = serve(raw.display().to_string())?;
        let file = format!(
            "driver=file,node-name=f,filename={},cache.direct=on,aio=io_uring,discard=unmap",
            theirs.display()
        );
        let image = "driver=qcow2,node-name=q,file=f,discard=unmap,cache.direct=on";
        let qsd = Qsd::start(&Start {
            program: plan.qsd.as_deref().unwrap_or(Path::new(QSD)),
            blockdevs: &[file, image.to_owned()],
            socket: &root.join("qsd.sock"),
            // Threads run on the CPU that a worker would have.
            cpus,
        })?;
        Ok(Self {
            vnvme,
            raw,
            qsd,
            _dir: dir,
        })
    }

    fn measure(
        &self,
        plan: &Plan,
        outcome: &mut SuiteResults,
        kind: &Kind,
        rw: Rw,
        depth: u16,
        cores: &Cores,
    ) -> Result<()> {
        let job = Job {
            rw,
            runtime: plan.runtime / SLICES,
            ramp: plan.ramp / SLICES,
            ..plan.job(depth, &cores.client)
        };
        let sockets = [
            ("vnvme", self.vnvme.export(0)),
            ("qsd", self.qsd.socket.clone()),
            ("raw", self.raw.export(0)),
        ];
        let mut totals = [(); 3].map(|()| Measured::default());
        for slice in 0..SLICES {
            let order = if slice % 2 == 0 { [0, 1, 2] } else { [2, 1, 0] };
            for side in order {
                if let (Some((_, socket)), Some(total)) = (sockets.get(side), totals.get_mut(side))
                {
                    let target = VirtioTarget::open(socket, &job)?;
                    total.append(&ran(load::run(&target, &job, &mut ()))?);
                }
            }
        }
        let iops: Vec<f64> = totals.iter().map(Measured::iops).collect();
        for ((word, _), total) in sockets.iter().zip(&totals) {
            let name = format!("{} {word} {}", rw.word(), kind.word);
            let case = case(&name, depth);
            let both = total.both();
            let c = &mut outcome.collector;
            c.add(case, "iops", "1/s", total.iops());
            c.add(case, "p50_ns", "ns", both.percentile(50.0) as f64);
            c.add(case, "p99_ns", "ns", both.percentile(99.0) as f64);
        }
        if let [ours, theirs, raw] = iops.as_slice() {
            let ratio = ours / theirs.max(1e-9);
            let name = format!("{} {}", rw.word(), kind.word);
            outcome
                .collector
                .add(case(&name, depth), "of_qsd", "ratio", ratio);
            eprintln!(
                "  {name}, depth {depth}: {ours:.0} by vnvme, {theirs:.0} by {QSD}: {ratio:.2}; \
                 a raw file: {raw:.0}"
            );
        }
        Ok(())
    }
}

/// Returns a slice's figures. A single flush of a disk may take longer than the whole slice, so
/// that no I/O completed.
fn ran(slice: Result<Measured>) -> Result<Measured> {
    slice.or_else(|error| match error.downcast_ref() {
        Some(&NothingEnded(elapsed)) => Ok(Measured {
            elapsed,
            ..Measured::default()
        }),
        None => Err(error),
    })
}

fn case(name: &str, depth: u16) -> Case<'_> {
    Case {
        suite: SUITE,
        case: name,
        depth: depth.into(),
        queues: 1,
    }
}

fn tool(program: &str, words: &[&str], dir: &Path) -> Result<()> {
    let output = Command::new(program).args(words).current_dir(dir).output();
    let output = output.context(program.to_owned())?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Creates a raw file full of data.
fn full(path: &Path) -> Result<()> {
    let mut file = File::create(path)?;
    let mut chunk = vec![0; 1 << 20];
    for offset in (0..FULL).step_by(chunk.len()) {
        load::pattern::fill(&mut chunk, offset, 1);
        file.write_all(&chunk)?;
    }
    Ok(file.sync_all()?)
}

/// Creates an image of this kind in a directory of its own.
fn make(kind: &Kind, dir: &Path) -> Result<PathBuf> {
    let img = |words: &[&str]| tool("qemu-img", words, dir);
    let create = ["create", "-q", "-f", "qcow2"];
    let full_image = || -> Result<()> {
        let path = dir.join("raw");
        full(&path)?;
        img(&["convert", "-f", "raw", "-O", "qcow2", "raw", "base"])?;
        std::fs::remove_file(path)?;
        Ok(())
    };
    let name = match kind.word {
        "filled" => {
            full_image()?;
            "base"
        }
        "chain" => {
            full_image()?;
            let names = ["base", "one", "two", "three"];
            for (number, pair) in names.windows(2).enumerate() {
                let [below, name] = pair else { continue };
                img(&[&create[..], &["-b", below, "-F", "qcow2", name]].concat())?;
                let eighth = FULL >> 23;
                let write = format!(
                    "write -q -P {} {}M {eighth}M",
                    number + 1,
                    number as u64 * eighth * 2
                );
                tool("qemu-io", &["-f", "qcow2", "-c", &write, name], dir)?;
            }
            "three"
        }
        "empty" => {
            img(&[&create[..], &["disk", EMPTY]].concat())?;
            "disk"
        }
        word => {
            match word {
                "copy" => full(&dir.join("base"))?,
                _ => img(&["create", "-q", "-f", "raw", "base", EMPTY])?,
            }
            img(&[&create[..], &["-b", "base", "-F", "raw", "disk"]].concat())?;
            "disk"
        }
    };
    // No write-back of the image or its backing file may be under way: the kernel would write dirty
    // pages before it reads past them.
    for entry in std::fs::read_dir(dir)? {
        File::open(entry?.path())?.sync_all()?;
    }
    Ok(dir.join(name))
}
