//! qcow2 images that qemu-img and qemu-io have made, in many forms, under random requests: the
//! volume does what a byte vector does, and `qemu-img check` and `qemu-img convert` agree.
//!
//! `VNVME_CASES` has more of them tried than a few.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::nbd::{QEMU, tree};
use anyhow::{Context, Result, ensure};
use dma::{Buffer, SegmentList};
use harness::progress::skip;
use harness::tree::Tree;
use qcow2::{Qcow2Options, Qcow2Volume};
use volume::{Completion, Direct, Io, IoOptions, Op, Request, Volume};

/// Cases, where nothing else is said.
const CASES: u64 = 14;

/// Random numbers that are the same in each run (xorshift64*).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 16) % end.max(1)
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len.div_ceil(8))
            .flat_map(|_| self.next().to_le_bytes())
            .take(len)
            .collect()
    }
}

struct Case<'a> {
    tree: &'a Tree,
    dir: PathBuf,
    chance: Chance,
}

impl Case<'_> {
    fn path(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn io(&self, image: &str, format: &str, commands: &[String]) -> Result<()> {
        let mut words = vec!["-f", format];
        for command in commands {
            words.extend(["-c", command]);
        }
        words.push(image);
        self.tree.run("qemu-io", &words).map(drop)
    }

    /// Some writes and zeroes here and there, of patterns of a byte.
    fn some(&mut self, image: &str, format: &str, size: u64) -> Result<()> {
        let mut commands = Vec::new();
        for _ in 0..self.chance.below(12) {
            let at = self.chance.below(size / 512) * 512;
            let len = ((1 + self.chance.below(400)) * 512).min(size - at);
            commands.push(match self.chance.below(5) {
                0 => format!("write -z {at} {len}"),
                1 if format == "qcow2" => format!("discard {at} {len}"),
                _ => format!("write -P {} {at} {len}", 1 + self.chance.below(254)),
            });
        }
        self.io(image, format, &commands)
    }

    /// A chain of up to four; its uppermost image.
    fn make(&mut self) -> Result<String> {
        let size = (1 + self.chance.below(12)) * (1 << 20) + self.chance.below(3) * 512 * 7;
        let layers = 1 + self.chance.below(4);
        let mut below: Option<(String, &str)> = None;
        for layer in 0..layers {
            let is_top = layer == layers - 1;
            // Layers are of different sizes.
            let size = if is_top {
                size
            } else {
                size / 2 + self.chance.below(size / 512) * 512
            };
            let raw = !is_top && layer == 0 && self.chance.below(3) == 0;
            let format = if raw { "raw" } else { "qcow2" };
            let image = self.path(&format!("{layer}"));
            let bytes = size.to_string();
            if raw {
                self.tree
                    .run("qemu-img", &["create", "-q", "-f", "raw", &image, &bytes])?;
            } else {
                self.image(&image, below.as_ref(), &bytes)?;
            }
            self.some(&image, format, size)?;
            if !is_top && !raw && self.chance.below(3) == 0 {
                self.compress(&image, below.as_ref())?;
            }
            below = Some((image, format));
        }
        Ok(self.path(&(layers - 1).to_string()))
    }

    fn image(&mut self, image: &str, below: Option<&(String, &str)>, size: &str) -> Result<()> {
        let cluster = self.chance.of(&["512", "4k", "64k", "64k", "2M"]);
        let bits = self.chance.of(&["8", "16", "16", "32", "64"]);
        let mut options = format!("cluster_size={cluster},refcount_bits={bits}");
        if self.chance.below(4) == 0 {
            options += ",lazy_refcounts=on";
        }
        if below.is_none() {
            let kind = self
                .chance
                .of(&["off", "off", "metadata", "falloc", "full"]);
            options += &format!(",preallocation={kind}");
        }
        let mut words = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if let Some((below, format)) = below {
            words.extend(["-b", below, "-F", format]);
        }
        words.extend([image, size]);
        self.tree.run("qemu-img", &words).map(drop)
    }

    /// The same image with compressed clusters.
    fn compress(&self, image: &str, below: Option<&(String, &str)>) -> Result<()> {
        let packed = format!("{image}.packed");
        let mut words = vec!["convert", "-c", "-O", "qcow2", "-f", "qcow2"];
        if let Some((below, format)) = below {
            words.extend(["-B", below, "-F", format]);
        }
        words.extend([image, &packed]);
        self.tree.run("qemu-img", &words)?;
        std::fs::rename(packed, image)?;
        Ok(())
    }

    /// The disk's bytes, as QEMU reads them.
    fn bytes(&self, image: &str) -> Result<Vec<u8>> {
        let raw = self.path("raw");
        self.tree.run(
            "qemu-img",
            &["convert", "-f", "qcow2", "-O", "raw", image, &raw],
        )?;
        Ok(std::fs::read(raw)?)
    }
}

/// `None`: in order. Else what is amiss; leaks are, too.
fn check(tree: &Tree, image: &str) -> Result<Option<String>> {
    let mut command: Command = tree.tool("qemu-img")?;
    let output = command.args(["check", image]).output()?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    Ok((!output.status.success()).then(|| text.into_owned()))
}

struct Expect {
    op: Op,
    at: usize,
    bytes: Vec<u8>,
}

/// Random requests, many at a time, none on another's bytes.
fn batch(
    chance: &mut Chance,
    volume: &dyn Volume,
    io: &Io,
    queue: &mut volume::OpenQueue,
    model: &mut [u8],
) {
    let unit = volume.info().block_size as usize;
    let zeroes = volume.info().zeroes_after_deallocate;
    let mut taken: Vec<(usize, usize)> = Vec::new();
    let (mut expect, mut done): (Vec<Expect>, Vec<Completion>) = (Vec::new(), Vec::new());
    for _ in 0..1 + chance.below(20) {
        let most = chance.of(&[unit, 4096, 65536, 600_000]).max(unit);
        let at = chance.below((model.len() / unit) as u64) as usize * unit;
        let len = (1 + chance.below((most / unit) as u64) as usize) * unit;
        let len = len.min(model.len() - at);
        if len == 0 || taken.iter().any(|&(from, to)| at < to && from < at + len) {
            continue;
        }
        taken.push((at, at + len));
        let fua = chance.below(4) == 0;
        let op = match chance.below(8) {
            0..=2 => Op::Read,
            3..=5 => Op::Write { fua },
            6 => Op::WriteZeroes {
                deallocate: chance.below(2) == 0,
                fua,
            },
            _ if zeroes => Op::Deallocate,
            _ => Op::Flush,
        };
        let bytes = match op {
            Op::Read => model[at..at + len].to_vec(),
            Op::Write { .. } => chance.bytes(len),
            Op::Flush => Vec::new(),
            _ => vec![0; len],
        };
        let data = match op {
            Op::Write { .. } => SegmentList::owned(Buffer::from_slice(&bytes)),
            Op::Read => SegmentList::owned(Buffer::new(len)),
            _ => SegmentList::new(),
        };
        let len = if op == Op::Flush { 0 } else { len as u64 };
        let request = Request {
            tag: expect.len() as u64,
            op,
            offset: at as u64,
            len,
            data,
        };
        expect.push(Expect { op, at, bytes });
        done.extend(queue.submit(request));
    }
    while done.len() < expect.len() {
        io.flush();
        io.poll(&mut |completion| done.push(completion));
        queue.poll(&mut |completion| done.push(completion));
    }
    for Completion { tag, result, data } in done {
        let Expect { op, at, bytes } = &expect[tag as usize];
        result.unwrap_or_else(|error| panic!("{op:?} at {at}: {error}"));
        match op {
            Op::Read => assert!(
                data.equals(0, bytes),
                "read of {} bytes at {at}",
                bytes.len()
            ),
            _ => model[*at..at + bytes.len()].copy_from_slice(bytes),
        }
    }
}

/// `false`: there is no io_uring here.
fn case(tree: &Tree, dir: &Path, seed: u64) -> Result<bool> {
    let chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut case = Case {
        tree,
        dir: dir.canonicalize()?,
        chance,
    };
    let image = case.make()?;
    let mut model = case.bytes(&image)?;
    let options = Qcow2Options {
        direct: case.chance.of(&[Direct::Auto, Direct::Off]),
        backing: Some(case.dir.clone()),
        ..Qcow2Options::default()
    };
    for _ in 0..2 {
        let volume = Qcow2Volume::open(Path::new(&image), &options)?;
        ensure!(volume.info().size == model.len() as u64, "another size");
        let io = Io::new(IoOptions {
            capacity: 128,
            ..IoOptions::default()
        });
        let Ok(mut queue) = volume.open(&io) else {
            return Ok(false);
        };
        for _ in 0..15 {
            batch(&mut case.chance, &volume, &io, &mut queue, &mut model);
            if case.chance.below(8) == 0 {
                let size = model.len() + 4096 * (1 + case.chance.below(500) as usize);
                match volume.resize(size as u64) {
                    Ok(()) => model.resize(size, 0),
                    Err(error) => {
                        let text = error.to_string();
                        ensure!(
                            text.contains("backing file is larger") || text.contains("blocks"),
                            "{text}"
                        );
                    }
                }
            }
            if case.chance.below(6) == 0 {
                // As a kill would leave it.
                let copy = case.path("copy");
                std::fs::copy(&image, &copy)?;
                if let Some(text) = check(tree, &copy)? {
                    ensure!(
                        !text.contains("ERROR") && !text.contains("errors were found"),
                        "{text}"
                    );
                }
                ensure!(case.bytes(&copy)? == model, "a copy of it differs");
            }
        }
        drop(queue);
        drop(volume);
        if let Some(text) = check(tree, &image)? {
            anyhow::bail!("{text}");
        }
        ensure!(case.bytes(&image)? == model, "QEMU reads something else");
    }
    // QEMU continues with the image, and this test after QEMU.
    let size = model.len() as u64;
    case.some(&image, "qcow2", size)?;
    let model = case.bytes(&image)?;
    let volume = Qcow2Volume::open(Path::new(&image), &options)?;
    let mut all = Buffer::new(model.len());
    volume.read_at(0, &mut all).context("no way to read")??;
    ensure!(
        all[..] == model[..],
        "what QEMU has written is read otherwise"
    );
    Ok(true)
}

#[test]
fn images_of_every_form_match_byte_array() -> Result<()> {
    let Some(tree) = tree(&QEMU) else {
        return Ok(());
    };
    let cases = match std::env::var("VNVME_CASES") {
        Ok(text) => text.parse()?,
        Err(_) => CASES,
    };
    for seed in 0..cases {
        let dir = tempfile::tempdir()?;
        if !case(&tree, dir.path(), seed).with_context(|| format!("case {seed}"))? {
            skip(
                "harness: qcow2 images of every form",
                "there is no io_uring",
            );
            return Ok(());
        }
    }
    Ok(())
}

/// What is refused names what would help.
#[test]
fn unsupported_image_is_refused_with_reason() -> Result<()> {
    let Some(tree) = tree(&QEMU) else {
        return Ok(());
    };
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    let make = |name: &str, options: &str| -> Result<String> {
        let image = path(name);
        let words = ["create", "-q", "-f", "qcow2", "-o", options, &image, "4M"];
        tree.run("qemu-img", &words)?;
        Ok(image)
    };
    let refused = |image: &str| -> Result<String> {
        match Qcow2Volume::open(Path::new(image), &Qcow2Options::default()) {
            Ok(_) => anyhow::bail!("{image} was opened"),
            Err(error) => Ok(error.to_string()),
        }
    };
    for (name, options, word) in [
        ("l2", "extended_l2=on,cluster_size=128k", "extended_l2=off"),
        ("zstd", "compression_type=zstd", "compression_type=zlib"),
        ("old", "compat=0.10", "compat=1.1"),
        ("narrow", "refcount_bits=2", "refcounts of 2 bits"),
        (
            "data",
            &format!("data_file={}", path("data.raw")),
            "external data file",
        ),
    ] {
        let text = refused(&make(name, options)?)?;
        ensure!(text.contains(word), "{name}: {text}");
    }
    let snapshot = make("snapshot", "cluster_size=64k")?;
    tree.run("qemu-img", &["snapshot", "-c", "one", &snapshot])?;
    ensure!(refused(&snapshot)?.contains("snapshot -d"));
    let bitmap = make("bitmap", "cluster_size=64k")?;
    tree.run("qemu-img", &["bitmap", "--add", &bitmap, "b"])?;
    ensure!(refused(&bitmap)?.contains("bitmap --remove"));
    // All that is only about writing can be read.
    for name in ["old", "narrow", "snapshot", "bitmap"] {
        let options = Qcow2Options {
            read_only: true,
            ..Qcow2Options::default()
        };
        Qcow2Volume::open(Path::new(&path(name)), &options)?;
    }
    Ok(())
}
