//! Job on a target, as given on the command line.

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use driver::MemorySource;
use std::time::Duration;
use volume::parse_number;

/// Direction and order of the I/O, by fio's words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum Rw {
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
    /// Random reads.
    #[default]
    RandRead,
    /// Random writes.
    RandWrite,
    /// Random reads and writes, mixed by --rwmixread.
    #[value(name = "randrw")]
    RandMixed,
    /// Sequential reads and sequential writes, mixed by --rwmixread.
    #[value(name = "rw", alias = "readwrite")]
    Mixed,
    /// Sequential deallocation.
    Trim,
    /// Random deallocation.
    RandTrim,
}

impl Rw {
    /// Returns fio's word for this kind of I/O.
    pub fn word(self) -> &'static str {
        match self {
            Rw::Read => "read",
            Rw::Write => "write",
            Rw::RandRead => "randread",
            Rw::RandWrite => "randwrite",
            Rw::RandMixed => "randrw",
            Rw::Mixed => "rw",
            Rw::Trim => "trim",
            Rw::RandTrim => "randtrim",
        }
    }

    /// Returns whether the offsets are random.
    pub fn is_random(self) -> bool {
        !matches!(self, Rw::Read | Rw::Write | Rw::Mixed | Rw::Trim)
    }

    /// Returns whether the job reads and writes.
    pub fn is_mixed(self) -> bool {
        matches!(self, Rw::Mixed | Rw::RandMixed)
    }

    /// Returns whether the job only deallocates.
    pub fn trims(self) -> bool {
        matches!(self, Rw::Trim | Rw::RandTrim)
    }

    /// Returns whether the job overwrites or discards existing data.
    pub fn writes(self) -> bool {
        !matches!(self, Rw::Read | Rw::RandRead)
    }
}

/// Used part of a target, from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// A number of bytes.
    Bytes(u64),
    /// A percentage.
    Percent(u8),
}

impl Extent {
    /// Returns the number of bytes used of a target with `size` bytes.
    pub fn of(self, size: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.min(size),
            Self::Percent(percent) => {
                let part = u128::from(size) * u128::from(percent.min(100)) / 100;
                // Not more than `size`.
                u64::try_from(part).unwrap_or(size)
            }
        }
    }
}

/// How this side rings doorbells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Doorbells {
    /// Shadow doorbells where the controller offers them (Doorbell Buffer Config).
    #[default]
    Shadow,
    /// Registers only.
    Mmio,
}

/// Options of one job.
#[derive(Args, Clone, Debug)]
pub struct JobArgs {
    /// I/O pattern
    #[arg(long, value_enum, default_value_t, value_name = "RW")]
    pub rw: Rw,
    /// Percentage of reads in mixed I/O
    #[arg(long, default_value_t = 50, value_name = "PERCENT")]
    #[arg(value_parser = parse_number::<u8, 0, 100>)]
    pub rwmixread: u8,
    /// Size of each I/O, like 4k or 1M
    #[arg(long, default_value = "4k", value_parser = size, value_name = "SIZE")]
    pub bs: u64,
    /// Outstanding I/Os on each queue
    #[arg(long, default_value_t = 1, value_parser = parse_number::<u16, 1, 4095>, value_name = "N")]
    pub iodepth: u16,
    /// Ring the doorbell after at most N submissions; fio's default is 1 [default: after all
    /// possible submissions]
    #[arg(long, value_name = "N", value_parser = parse_number::<u16, 0, { u16::MAX as u64 }>)]
    pub iodepth_batch: Option<u16>,
    /// Threads with a queue pair each; fio's name is numjobs
    #[arg(long, visible_alias = "numjobs", default_value_t = 1, value_name = "N")]
    #[arg(value_parser = parse_number::<u16, 1, 64>)]
    pub queues: u16,
    /// Measuring time: seconds, or with a unit, like 500ms or 2m [default: 5; in a suite at most 1
    /// for each case]
    #[arg(long, value_parser = time, value_name = "TIME")]
    pub runtime: Option<Duration>,
    /// Time to run before measuring begins; fio's name is ramp_time
    #[arg(long, visible_alias = "ramp_time", default_value = "0.25")]
    #[arg(value_parser = time, value_name = "TIME")]
    pub ramp: Duration,
    /// Stop after N I/Os on each queue, all of them measured, instead of after a time
    #[arg(long, value_name = "N", value_parser = parse_number::<u64, 0, { u64::MAX }>)]
    pub ios: Option<u64>,
    /// Time one I/O in N; 0 for none, only with --ios [default: 1 to 31, depending on the rate]
    #[arg(long, value_name = "N", value_parser = parse_number::<u32, 0, { u32::MAX as u64 }>)]
    pub sample: Option<u32>,
    /// Use only this much of the target from its start: a size, or a percentage like 10%
    #[arg(long, value_parser = extent, value_name = "SIZE")]
    pub size: Option<Extent>,
    /// Write a pattern derived from offset and seed, check it on every read, and read back all
    /// written blocks
    #[arg(long)]
    pub verify: bool,
    /// Seed of offsets and pattern; to read with --verify, give the seed of the write
    #[arg(long, value_name = "N", value_parser = parse_number::<u64, 0, { u64::MAX }>)]
    pub seed: Option<u64>,
    /// Poll for completions (the default)
    #[arg(long, conflicts_with = "interrupt")]
    pub poll: bool,
    /// Wait for completions in the kernel, for interrupts
    #[arg(long)]
    pub interrupt: bool,
    /// Doorbells of the driver
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    pub doorbells: Doorbells,
    /// CPUs to pin the threads to, one each, in turn [default: not pinned]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    #[arg(value_parser = parse_number::<usize, 0, { u32::MAX as u64 }>)]
    pub cpus: Vec<usize>,
}

/// A job with checked parameters.
#[derive(Clone, Debug)]
pub struct Job {
    /// Direction and order of the I/O.
    pub rw: Rw,
    /// Percentage of reads in mixed I/O.
    pub mix_read: u8,
    /// Size of one I/O in bytes.
    pub bs: u64,
    /// Number of I/Os in flight on each queue.
    pub depth: u16,
    /// Maximum number of submissions before the doorbell is rung.
    pub batch: u16,
    /// Number of threads, with one queue each.
    pub queues: u16,
    /// Measuring time, unless `ios` limits the job.
    pub runtime: Duration,
    /// Time for which the load runs before measuring begins.
    pub ramp: Duration,
    /// Number of I/Os on each queue after which the job ends; `None`: limited by time.
    pub ios: Option<u64>,
    /// Sampling interval of latencies in I/Os; `None`: derived from the rate.
    pub sample: Option<u32>,
    /// Used part of the target, from its start; `None` for all.
    pub size: Option<Extent>,
    /// Whether data is generated from offset and seed, and verified.
    pub verify: bool,
    /// Seed of offsets and data.
    pub seed: u64,
    /// Whether completions are waited for in the kernel instead of by polling.
    pub interrupt: bool,
    /// Kind of doorbells that this side uses.
    pub doorbells: Doorbells,
    /// CPUs to pin the threads to, in turn; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Source of the memory for queues and data.
    pub memory: MemorySource,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            rw: Rw::RandRead,
            mix_read: 50,
            bs: 4096,
            depth: 1,
            batch: u16::MAX,
            queues: 1,
            runtime: Duration::from_secs(5),
            ramp: Duration::from_millis(500),
            ios: None,
            sample: None,
            size: None,
            verify: false,
            seed: 1,
            interrupt: false,
            doorbells: Doorbells::Shadow,
            cpus: Vec::new(),
            memory: MemorySource::default(),
        }
    }
}

impl JobArgs {
    /// Checks the constraints that the options' types do not express.
    pub fn job(&self) -> Result<Job> {
        ensure!(self.bs > 0, "--bs 0");
        // A job's time ends with a timed I/O.
        ensure!(
            self.sample != Some(0) || self.ios.is_some(),
            "--sample 0 needs --ios"
        );
        ensure!(
            !(self.verify && self.rw.trims()),
            "--verify: blocks after {} have no pattern to check; use another --rw",
            self.rw.word()
        );
        if self.verify && !self.rw.writes() {
            ensure!(
                self.seed.is_some(),
                "reading with --verify needs the --seed that was written with"
            );
        }
        Ok(Job {
            rw: self.rw,
            mix_read: self.rwmixread,
            bs: self.bs,
            depth: self.iodepth,
            batch: self.iodepth_batch.unwrap_or(u16::MAX).max(1),
            queues: self.queues,
            runtime: self.runtime.unwrap_or(Duration::from_secs(5)),
            ramp: match self.ios {
                Some(_) => Duration::ZERO,
                None => self.ramp,
            },
            ios: self.ios,
            sample: self.sample,
            size: self.size,
            verify: self.verify,
            seed: self.seed.unwrap_or_else(fresh_seed),
            interrupt: self.interrupt && !self.poll,
            doorbells: self.doorbells,
            cpus: self.cpus.clone(),
            memory: MemorySource::default(),
        })
    }
}

/// Returns a new seed, so that an earlier run's data on the disk is not mistaken for this one's.
fn fresh_seed() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(1, |d| d.as_nanos() as u64)
}

/// Parses a time in fio's format: seconds, or a number with one of the units us, ms, s, m, h, d.
fn time(text: &str) -> Result<Duration, &'static str> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default();
    let seconds = match unit {
        "us" | "usec" => 1e-6,
        "ms" | "msec" => 1e-3,
        "" | "s" | "sec" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err("the unit is unknown; known are us, ms, s, m, h and d"),
    };
    let number: f64 = digits
        .parse()
        .map_err(|_| "a time is a number of seconds, or one with a unit, such as 5s or 500ms")?;
    match Duration::try_from_secs_f64(number * seconds) {
        Ok(time) if time < Duration::from_secs(1_000_000) => Ok(time),
        _ => Err("a time is less than a million seconds, and not negative"),
    }
}

/// Parses an extent: a size such as `10G`, or a percentage of the target such as `10%`.
fn extent(text: &str) -> Result<Extent, &'static str> {
    let Some(number) = text.strip_suffix('%') else {
        return size(text).map(Extent::Bytes);
    };
    let percent = number
        .parse()
        .ok()
        .filter(|percent| (1..=100).contains(percent));
    percent
        .map(Extent::Percent)
        .ok_or("a part is a whole number from 1% to 100%")
}

/// Parses a size as fio writes it, such as `4k`: [`volume::parse_size`] accepts only the capital
/// letter.
pub fn size(text: &str) -> Result<u64, &'static str> {
    volume::parse_size(&text.to_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        job: JobArgs,
    }

    fn job(words: &[&str]) -> Result<Job> {
        Line::try_parse_from([&["bench"], words].concat())?
            .job
            .job()
    }

    #[test]
    fn fio_options_are_parsed() {
        let job = job(&[
            "--rw=randrw",
            "--rwmixread=70",
            "--bs=16k",
            "--iodepth=32",
            "--ramp=0.25",
        ])
        .unwrap();
        assert_eq!(
            (job.rw, job.mix_read, job.bs, job.depth),
            (Rw::RandMixed, 70, 16384, 32)
        );
        assert_eq!(job.ramp, Duration::from_millis(250));
        assert!(!job.interrupt);
    }

    #[test]
    fn fio_option_forms_are_parsed() {
        let of = |words: &[&str]| job(words).unwrap();
        assert_eq!(of(&["--numjobs=4"]).queues, 4);
        assert_eq!(of(&["--rw=rw"]).rw, Rw::Mixed);
        assert_eq!(of(&["--rw", "readwrite"]).rw, Rw::Mixed);
        assert_eq!(of(&["--rw=randtrim"]).rw, Rw::RandTrim);
        for (text, millis) in [
            ("5", 5000),
            ("5s", 5000),
            ("0.5", 500),
            ("500ms", 500),
            ("2m", 120_000),
            ("1h", 3_600_000),
        ] {
            let runtime = of(&["--runtime", text]).runtime;
            assert_eq!(runtime, Duration::from_millis(millis), "{text}");
        }
        assert_eq!(of(&["--size=10%"]).size, Some(Extent::Percent(10)));
        assert_eq!(of(&["--size=10g"]).size, Some(Extent::Bytes(10 << 30)));
        assert_eq!(Extent::Percent(10).of(1 << 20), 104_857);
        assert_eq!(Extent::Percent(100).of(u64::MAX), u64::MAX);
        assert_eq!(Extent::Bytes(7).of(3), 3);
    }

    #[test]
    fn invalid_options_are_refused() {
        for bad in [
            &["--bs=0"][..],
            &["--runtime=-1"],
            &["--runtime=1e99"],
            &["--iodepth=0"],
            &["--rwmixread=101"],
            &["--rw=trimwrite"],
            &["--rw=trim", "--verify"],
            &["--runtime=5x"],
            &["--runtime=s"],
            &["--runtime=1s1"],
            &["--size=0%"],
            &["--size=101%"],
            &["--size=1.5%"],
            &["--numjobs=0"],
            &["--verify"],
            &["--poll", "--interrupt"],
            &["--sample=0"],
        ] {
            assert!(job(bad).is_err(), "{bad:?}");
        }
        assert!(job(&["--verify", "--seed=3"]).is_ok());
        assert!(job(&["--verify", "--rw=write"]).is_ok());
        assert!(job(&["--sample=0", "--ios=1"]).is_ok());
    }
}
