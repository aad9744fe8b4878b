//! The processor's counter: the time stamp counter of x86-64, the virtual counter of AArch64.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time for which the cycle counter is compared with the clock to determine its frequency.
const CALIBRATION: Duration = Duration::from_millis(10);

/// Reads the processor's counter. It counts at a constant rate ([`cycles_per_second`]), equal on
/// every processor of a working machine. Reading it does not wait for earlier or later
/// instructions. A single reading is therefore precise only to the processor's reordering window of
/// some dozens of cycles, which averages out.
#[inline(always)]
pub fn cycles() -> u64 {
    counter()
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, which only reads a counter.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "aarch64")]
#[inline(always)]
fn counter() -> u64 {
    let count: u64;
    // SAFETY: reads a counter that Linux lets every process read.
    unsafe {
        std::arch::asm!("mrs {}, cntvct_el0", out(reg) count, options(nomem, nostack, preserves_flags));
    }
    count
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn counter() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Returns the rate of [`cycles`]. The first call measures it for ten milliseconds and must not be
/// on the data path.
pub fn cycles_per_second() -> f64 {
    static RATE: OnceLock<f64> = OnceLock::new();
    *RATE.get_or_init(|| {
        let (start, first) = (Instant::now(), cycles());
        while start.elapsed() < CALIBRATION {
            std::hint::spin_loop();
        }
        let (elapsed, last) = (start.elapsed(), cycles());
        last.wrapping_sub(first) as f64 / elapsed.as_secs_f64()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cycle_counter_increases() {
        let first = cycles();
        std::thread::sleep(Duration::from_millis(2));
        let rate = cycles_per_second();
        assert!(cycles() > first && rate > 1e5, "{rate}");
        assert_eq!(rate, cycles_per_second());
    }
}
