//! Budget of the time for which a client's memory files keep a thread waiting in the kernel.

use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use sync::Unpoisoned;

/// Waiting time that a client may cause before its next mapping is delayed. An honest client's
/// files cause none; on a busy machine its share of other threads' waiting stays far below.
const ALLOWANCE: Duration = Duration::from_secs(1);
/// Quotient of elapsed time and the waiting time that it pays for.
const SHARE: u32 = 20;
/// Largest waiting time that is remembered. It delays the next mapping by a second, so that the
/// client still has its answer within two seconds.
const MAX_DEBT: Duration = ALLOWANCE.saturating_add(Duration::from_millis(50));

/// Waiting time that one disk's clients have caused, less the part that time has paid for. A client
/// that connects again does not get a new budget.
#[derive(Debug, Default)]
pub(crate) struct Pace(Mutex<Debt>);

#[derive(Debug, Default)]
struct Debt {
    waited: Duration,
    /// Time at which `waited` was correct; `None` before the first charge.
    at: Option<Instant>,
}

impl Debt {
    fn now(&self, now: Instant) -> Duration {
        let elapsed = self.at.map(|at| now.saturating_duration_since(at));
        let paid = elapsed.unwrap_or_default() / SHARE;
        self.waited.saturating_sub(paid)
    }
}

impl Pace {
    /// Adds the time that a call of the kernel has waited.
    pub(crate) fn charge(&self, waited: Duration, now: Instant) {
        let mut debt = self.0.lock().unpoisoned();
        debt.waited = debt.now(now).saturating_add(waited).min(MAX_DEBT);
        debt.at = Some(now);
    }

    /// Returns how long the client's next mapping has to wait.
    pub(crate) fn delay(&self, now: Instant) -> Duration {
        let debt = self.0.lock().unpoisoned().now(now);
        debt.saturating_sub(ALLOWANCE) * SHARE
    }
}

/// Measurement of the time for which the calling thread waits in the kernel. The time without a
/// processor alone does not count: a thread that is preempted does not sleep.
pub(crate) struct Standstill {
    began: Instant,
    cpu: Duration,
    sleeps: i64,
}

fn cpu_time() -> Duration {
    // The clock has no negative values.
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

/// Returns how often the calling thread has gone to sleep (voluntary context switches).
fn sleeps() -> i64 {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the structure is writable and lives as long as the call.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    // SAFETY: the structure has numbers only, for which all zeroes are valid.
    unsafe { usage.assume_init() }.ru_nvcsw
}

impl Standstill {
    pub(crate) fn begin() -> Standstill {
        Standstill {
            began: Instant::now(),
            cpu: cpu_time(),
            sleeps: sleeps(),
        }
    }

    /// Charges the time off the processor since the beginning, if the thread has slept.
    pub(crate) fn charge(self, pace: &Pace) {
        if sleeps() == self.sleeps {
            return;
        }
        let now = Instant::now();
        let worked = cpu_time().saturating_sub(self.cpu);
        let wall = now.saturating_duration_since(self.began);
        pace.charge(wall.saturating_sub(worked), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_is_delayed_after_allowance_is_spent() {
        let (pace, start) = (Pace::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        let delay = |millis| pace.delay(at(millis)).as_millis();
        assert_eq!(delay(0), 0);
        pace.charge(Duration::from_millis(1000), at(0));
        assert_eq!(delay(0), 0);
        pace.charge(Duration::from_millis(40), at(0));
        assert_eq!((delay(0), delay(200), delay(800)), (800, 600, 0));
        // A debt that was paid does not count again.
        pace.charge(Duration::from_millis(500), at(30_000));
        assert_eq!(delay(30_000), 0);
        pace.charge(Duration::from_secs(3600), at(30_000));
        assert_eq!((delay(30_000), delay(31_000)), (1000, 0));
    }
}
