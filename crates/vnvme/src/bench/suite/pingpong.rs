//! How fast two cores hand a cache line to each other and back: what a command costs at least.
//!
//! Two ways. `line`: one word there, one word back, each on a line of its own (and the one beside it, for processors fetch
//! pairs). `entry`: a 64-byte entry there, which is read whole, and a 16-byte completion back, as a queue pair has them.

use super::super::load::pin;
use anyhow::{Result, anyhow};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Rounds between two looks at the clock.
const ROUNDS: u64 = 200;

#[repr(align(128))]
struct Line<const N: usize>([AtomicU64; N]);

impl<const N: usize> Line<N> {
    fn new() -> Self {
        Line([const { AtomicU64::new(0) }; N])
    }

    /// Stores N words; the last one says that the others are there.
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
            // The flag is elsewhere, and unchanged: looking costs nothing that is between the two cores.
            if spins.is_multiple_of(1024) && stop.load(Ordering::Relaxed) {
                return false;
            }
            // No pause: on some processors it takes longer than the line.
        }
        rest.iter()
            .all(|word| word.load(Ordering::Relaxed) == round)
    }
}

/// Round trips in nanoseconds: medians over short stretches.
#[derive(Clone, Copy, Debug)]
pub struct RoundTrip {
    pub line: f64,
    pub entry: f64,
}

/// How long a measurement beside a case takes.
pub const SPAN: Duration = Duration::from_millis(60);

/// Measures for about `span` between two CPUs.
pub fn measure(client: usize, server: usize, span: Duration) -> Result<RoundTrip> {
    Ok(RoundTrip {
        line: one::<1, 1>(client, server, span / 2)?,
        entry: one::<8, 2>(client, server, span / 2)?,
    })
}

fn one<const THERE: usize, const BACK: usize>(
    client: usize,
    server: usize,
    span: Duration,
) -> Result<f64> {
    let (there, back) = (Line::<THERE>::new(), Line::<BACK>::new());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| -> Result<()> {
            let result = pin(&[server], 0).map(|()| {
                let mut round = 1;
                while there.wait(round, &stop) {
                    back.store(round);
                    round += 1;
                }
            });
            // Whoever goes first must not leave the other one waiting.
            stop.store(true, Ordering::Relaxed);
            result
        });
        let play = scope.spawn(|| -> Result<Vec<f64>> {
            let result = pin(&[client], 0).map(|()| {
                let mut round = 0;
                let mut stretches = Vec::new();
                let start = Instant::now();
                while start.elapsed() < span || stretches.len() < 8 {
                    let before = Instant::now();
                    for _ in 0..ROUNDS {
                        round += 1;
                        there.store(round);
                        if !back.wait(round, &stop) {
                            return stretches;
                        }
                    }
                    stretches.push(before.elapsed().as_nanos() as f64 / ROUNDS as f64);
                    if start.elapsed() > span * 20 {
                        break;
                    }
                }
                stretches
            });
            stop.store(true, Ordering::Relaxed);
            result
        });
        let stretches = play
            .join()
            .map_err(|_| anyhow!("the ping-pong ended by a bug"))??;
        echo.join()
            .map_err(|_| anyhow!("the ping-pong ended by a bug"))??;
        Ok(super::super::results::median(&stretches))
    })
}

#[cfg(test)]
mod tests {
    use super::super::Cores;
    use super::*;

    #[test]
    fn a_line_goes_there_and_back() {
        let Ok(cores) = Cores::pair() else {
            println!("skipped: it needs two CPUs");
            return;
        };
        let trip = measure(cores.client[0], cores.server[0], Duration::from_millis(10)).unwrap();
        assert!(trip.line > 1.0 && trip.entry > 1.0, "{trip:?}");
    }

    #[test]
    fn a_cpu_that_is_not_there_is_an_error() {
        assert!(measure(0, usize::MAX, Duration::from_millis(1)).is_err());
    }
}
