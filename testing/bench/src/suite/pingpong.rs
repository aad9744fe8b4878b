//! Speed at which two cores pass a cache line to each other and back: the lower bound for a
//! command.
//!
//! There are two ways. `line`: one word in each direction, each on a line of its own (and the one
//! beside it, because processors fetch pairs). `entry`: a 64-byte entry, which is read whole, and a
//! 16-byte completion back, as in a queue pair.
//!
//! The speed depends on the memory, too, see [`super::near`].

use crate::results::median;
use anyhow::{Context, Result, anyhow};
use dma::Memory;
use driver::MemorySource;
use load::pin;
use load::stats::GAP;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Size in bytes of the memory for one ping-pong: a line at its start and one in its middle.
pub const PAGE: usize = 4096;
/// Number of rounds between two readings of the clock.
const ROUNDS: u64 = 200;
/// Number of rounds for the measurement of one page.
const PROBE_ROUNDS: u64 = 64;

/// Atomic words of one cache line.
struct Line<'a, const N: usize>([&'a AtomicU64; N]);

impl<'a, const N: usize> Line<'a, N> {
    fn new(memory: &'a Memory, at: usize) -> Result<Self> {
        let words = (0..N).map(|word| memory.atomic_u64(at + word * 8));
        let words: Option<Vec<_>> = words.collect();
        let words = words.and_then(|words| words.try_into().ok());
        Ok(Line(words.context("the memory is too short")?))
    }

    /// Stores N words; the last one signals that the others are complete.
    #[inline]
    fn store(&self, round: u64) {
        let (last, rest) = match self.0.split_last() {
            Some(parts) => parts,
            None => return,
        };
        for word in rest {
            word.store(round, Ordering::Relaxed);
        }
        last.store(round, Ordering::Release);
    }

    /// Waits for a round and reads all words.
    #[inline]
    fn wait(&self, round: u64, stop: &AtomicBool) -> bool {
        let Some((last, rest)) = self.0.split_last() else {
            return false;
        };
        let mut spins = 0u32;
        while last.load(Ordering::Acquire) != round {
            spins = spins.wrapping_add(1);
            // The flag is elsewhere, and unchanged: looking costs nothing that is between the two
            // cores. It is set after the last round, which may be the one that is waited for.
            if spins.is_multiple_of(1024)
                && stop.load(Ordering::Acquire)
                && last.load(Ordering::Acquire) != round
            {
                return false;
            }
            // No pause: on some processors it takes longer than the line.
        }
        rest.iter()
            .all(|word| word.load(Ordering::Relaxed) == round)
    }
}

/// The two lines of a ping-pong, in one page.
struct Table<'a, const THERE: usize, const BACK: usize> {
    there: Line<'a, THERE>,
    back: Line<'a, BACK>,
}

impl<'a, const THERE: usize, const BACK: usize> Table<'a, THERE, BACK> {
    fn new(memory: &'a Memory, at: usize) -> Result<Self> {
        Ok(Self {
            there: Line::new(memory, at)?,
            back: Line::new(memory, at + PAGE / 2)?,
        })
    }

    /// Plays `rounds` rounds from `first` on. Returns the time, or `None` when the other side has
    /// stopped.
    #[inline]
    fn play(&self, first: u64, rounds: u64, stop: &AtomicBool) -> Option<Duration> {
        let before = Instant::now();
        for round in first..first + rounds {
            self.there.store(round);
            if !self.back.wait(round, stop) {
                return None;
            }
        }
        Some(before.elapsed())
    }

    /// Answers rounds from `first` on. Returns whether all of them arrived.
    #[inline]
    fn echo(&self, first: u64, rounds: u64, stop: &AtomicBool) -> bool {
        (first..first.saturating_add(rounds)).all(|round| {
            let came = self.there.wait(round, stop);
            if came {
                self.back.store(round);
            }
            came
        })
    }
}

/// Runs both sides, each on its CPU. When one side ends, the other stops waiting for it.
fn between<T: Send>(
    client: usize,
    server: usize,
    play: impl FnOnce(&AtomicBool) -> T + Send,
    echo: impl FnOnce(&AtomicBool) + Send,
) -> Result<T> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| {
            let result = pin(&[server], 0).map(|()| echo(&stop));
            stop.store(true, Ordering::Release);
            result
        });
        let play = scope.spawn(|| {
            let result = pin(&[client], 0).map(|()| play(&stop));
            stop.store(true, Ordering::Release);
            result
        });
        let bug = |_| anyhow!("the ping-pong ended by a bug");
        let result = play.join().map_err(bug)?;
        echo.join().map_err(bug)??;
        result
    })
}

/// Round trips in nanoseconds, as medians over short intervals.
#[derive(Clone, Copy, Debug)]
pub struct RoundTrip {
    pub line: f64,
    pub entry: f64,
}

/// Duration of the measurement beside a case.
pub const SPAN: Duration = Duration::from_millis(60);

/// Measures for about `span` between two CPUs, on memory from the same source as that of the queues
/// being measured.
pub fn measure(
    client: usize,
    server: usize,
    span: Duration,
    source: &MemorySource,
) -> Result<RoundTrip> {
    let memory = source.make(2 * PAGE)?;
    Ok(RoundTrip {
        line: median(&one::<1, 1>(client, server, span / 2, &memory, 0)?),
        entry: median(&one::<8, 2>(client, server, span / 2, &memory, PAGE)?),
    })
}

/// Result of a ping-pong before or after a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ping {
    /// Round trip in nanoseconds: the median over short intervals.
    pub round_trip: f64,
    /// Share of the time that was spent in gaps, in which one of the two sides had no CPU.
    pub gap_share: f64,
}

impl Ping {
    /// Summarizes intervals of [`ROUNDS`] rounds each, given in nanoseconds per round.
    fn of(stretches: &[f64]) -> Self {
        let gap = GAP.as_nanos() as f64 / ROUNDS as f64;
        let gaps = stretches.iter().filter(|nanos| **nanos > gap);
        Ping {
            round_trip: median(stretches),
            gap_share: gaps.sum::<f64>() / stretches.iter().sum::<f64>().max(1.0),
        }
    }

    /// Returns the mean of two results.
    pub fn mean(self, other: Self) -> Self {
        Ping {
            round_trip: (self.round_trip + other.round_trip) / 2.0,
            gap_share: (self.gap_share + other.gap_share) / 2.0,
        }
    }
}

/// Measures the round trip of one word for about `span`, in the first page of a memory.
pub fn line(client: usize, server: usize, span: Duration, memory: &Memory) -> Result<Ping> {
    let stretches = one::<1, 1>(client, server, span, memory, 0)?;
    Ok(Ping::of(&stretches))
}

/// Measures the nanoseconds of a round, in each of many intervals.
fn one<const THERE: usize, const BACK: usize>(
    client: usize,
    server: usize,
    span: Duration,
    memory: &Memory,
    at: usize,
) -> Result<Vec<f64>> {
    let table = Table::<THERE, BACK>::new(memory, at)?;
    // Left from the last time.
    table.there.store(0);
    table.back.store(0);
    let play = |stop: &AtomicBool| {
        let mut stretches = Vec::new();
        let start = Instant::now();
        let mut round = 1;
        while start.elapsed() < span || stretches.len() < 8 {
            let Some(took) = table.play(round, ROUNDS, stop) else {
                break;
            };
            round += ROUNDS;
            stretches.push(took.as_nanos() as f64 / ROUNDS as f64);
            if start.elapsed() > span * 20 {
                break;
            }
        }
        stretches
    };
    let echo = |stop: &AtomicBool| {
        table.echo(1, u64::MAX, stop);
    };
    between(client, server, play, echo)
}

/// Measures briefly the round trip in each of the first pages of a memory, in nanoseconds: the
/// better of two attempts.
pub fn pages(client: usize, server: usize, memory: &Memory, count: usize) -> Result<Vec<f64>> {
    let tables = (0..count).map(|page| Table::<1, 1>::new(memory, page * PAGE));
    let tables = tables.collect::<Result<Vec<_>>>()?;
    let firsts = [1, 1 + PROBE_ROUNDS];
    let play = |stop: &AtomicBool| {
        let mut best = vec![f64::INFINITY; tables.len()];
        for first in firsts {
            for (table, best) in tables.iter().zip(&mut best) {
                let took = table.play(first, PROBE_ROUNDS, stop)?;
                *best = best.min(took.as_nanos() as f64 / PROBE_ROUNDS as f64);
            }
        }
        Some(best)
    };
    let echo = |stop: &AtomicBool| {
        let all = firsts
            .into_iter()
            .flat_map(|first| tables.iter().map(move |t| (t, first)));
        for (table, first) in all {
            if !table.echo(first, PROBE_ROUNDS, stop) {
                break;
            }
        }
    };
    between(client, server, play, echo)?.context("the other side of the ping-pong has left")
}

#[cfg(test)]
mod tests {
    use super::super::Cores;
    use super::*;

    #[test]
    fn cache_line_round_trip_is_measured() {
        let Ok(cores) = Cores::pair() else {
            let what = "bench::suite::pingpong::cache_line_round_trip_is_measured";
            testkit::skip(what, "it needs two CPUs");
            return;
        };
        let (client, server) = (cores.client[0], cores.server[0]);
        let source = MemorySource::default();
        let trip = measure(client, server, Duration::from_millis(10), &source).unwrap();
        assert!(trip.line > 1.0 && trip.entry > 1.0, "{trip:?}");
        let memory = source.make(3 * PAGE).unwrap();
        let pages = pages(client, server, &memory, 3).unwrap();
        assert!(pages.iter().all(|&page| page > 1.0), "{pages:?}");
        assert_eq!(pages.len(), 3);
    }

    #[test]
    fn long_gaps_do_not_move_median() {
        let gap = GAP.as_nanos() as f64 / ROUNDS as f64;
        let ping = Ping::of(&[100.0, 100.0, gap * 2.0, 100.0]);
        assert_eq!(ping.round_trip, 100.0);
        let share = gap * 2.0 / (gap * 2.0 + 300.0);
        assert!((ping.gap_share - share).abs() < 1e-9, "{ping:?}");
        assert_eq!(Ping::of(&[100.0; 4]).gap_share, 0.0);
        let other = Ping {
            round_trip: 300.0,
            gap_share: 0.0,
        };
        assert_eq!(ping.mean(other).round_trip, 200.0);
    }

    #[test]
    fn pingpong_on_missing_cpu_is_error() {
        let source = MemorySource::default();
        for (client, server) in [(0, usize::MAX), (usize::MAX, 0)] {
            assert!(measure(client, server, Duration::from_millis(1), &source).is_err());
        }
    }

    #[test]
    fn pingpong_with_short_memory_is_error() {
        let memory = Memory::anonymous(PAGE).unwrap();
        assert!(pages(0, 1, &memory, 2).is_err());
    }
}
