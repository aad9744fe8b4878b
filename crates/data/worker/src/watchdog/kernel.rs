//! Human-readable state of a thread in the kernel.

use std::fmt::Write;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Maximum number of bytes read from a file in /proc; each of these files has one line.
const MAX_READ_LEN: usize = 1024;

/// Kernel files that describe one thread. They are opened once, at the start, because the process
/// may later give up its right to open files.
#[derive(Debug)]
pub(super) struct KernelView {
    stat: Option<File>,
    syscall: Option<File>,
    wchan: Option<File>,
}

impl KernelView {
    /// Opens the files in /proc that describe the calling thread.
    pub(super) fn of_calling_thread() -> Self {
        // These files belong to this process. Some kernels lack one or another.
        let open = |file: &str| File::open(format!("/proc/thread-self/{file}")).ok();
        Self {
            stat: open("stat"),
            syscall: open("syscall"),
            wchan: open("wchan"),
        }
    }

    /// Returns the CPU time that the thread has used, to some hundredths of a second.
    pub(super) fn cpu_time(&self) -> Option<Duration> {
        let ticks = ticks(&read(&self.stat))?;
        let per_second = rustix::param::clock_ticks_per_second().max(1);
        Some(Duration::from_nanos(
            (u128::from(ticks) * 1_000_000_000 / u128::from(per_second)) as u64,
        ))
    }

    /// Describes the thread's state, its system call with the descriptor in the first argument, and
    /// its kernel function, where known.
    pub(super) fn describe(&self) -> String {
        // "number (name) state ...", where the name may hold anything.
        let stat = read(&self.stat);
        let state = stat.rsplit(')').next().unwrap_or_default();
        let mut text = match state.trim_start().chars().next() {
            Some('R') => "running, or waiting for a processor",
            Some('D') => "waiting in the kernel, uninterruptibly",
            Some('S') => "waiting in the kernel",
            Some('T' | 't') => "stopped",
            _ => "in an unknown state",
        }
        .to_owned();
        let call = read(&self.syscall);
        let mut words = call.split_whitespace();
        // "running", or -1 outside of system calls.
        if let Some(number) = words.next().and_then(|word| word.parse::<u32>().ok()) {
            let _ = write!(text, ", system call {number}");
            let first = words.next().and_then(|word| word.strip_prefix("0x"));
            let first = first.and_then(|word| u64::from_str_radix(word, 16).ok());
            // The link is the name of the open file; reading it asks no file system.
            let link = first.map(|fd| std::fs::read_link(format!("/proc/self/fd/{fd}")));
            if let (Some(fd), Some(Ok(link))) = (first, link) {
                let _ = write!(text, " on descriptor {fd} ({})", link.display());
            }
        }
        let wchan = read(&self.wchan);
        if !matches!(wchan.as_str(), "" | "0") {
            let _ = write!(text, ", in {wchan}");
        }
        text
    }
}

/// Parses the user and system time in a line of `/proc/PID/stat`: fields 14 and 15, in ticks
/// (proc_pid_stat(5)).
fn ticks(stat: &str) -> Option<u64> {
    let behind_name = stat.rsplit(')').next()?;
    let mut fields = behind_name.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    next()?.checked_add(next()?)
}

/// Reads a kernel file's current content.
fn read(file: &Option<File>) -> String {
    let mut text = [0; MAX_READ_LEN];
    let read = file.as_ref().map(|file| file.read_at(&mut text, 0));
    let len = read.and_then(Result::ok).unwrap_or(0);
    let text = text.get(..len).unwrap_or_default();
    String::from_utf8_lossy(text).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};
    use std::time::Instant;

    #[test]
    fn wait_channel_of_thread_is_found() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                tell.send(KernelView::of_calling_thread()).unwrap();
                rustix::io::read(&event, &mut [0; 8]).unwrap();
            });
            let thread = told.recv().unwrap();
            let began = Instant::now();
            let mut text = thread.describe();
            while !text.contains("eventfd") && began.elapsed() < Duration::from_secs(10) {
                std::thread::yield_now();
                text = thread.describe();
            }
            rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
            if read(&thread.syscall).is_empty() {
                println!("skipped: the kernel does not say which system call a thread is in");
            } else {
                assert!(text.starts_with("waiting in the kernel"), "{text}");
                assert!(text.contains("[eventfd]"), "{text}");
            }
        });
    }

    #[test]
    fn cpu_time_is_parsed_after_any_name() {
        let line = "7 (a ) R 1 (x) S 1 2 3 4 5 6 7 8 9 10 40 2 3 4";
        assert_eq!(ticks(line), Some(42));
        assert_eq!(ticks("7 (a) S 1"), None);
        assert_eq!(ticks(""), None);
        let own = KernelView::of_calling_thread();
        assert!(
            own.cpu_time()
                .is_some_and(|time| time < Duration::from_secs(600))
        );
    }

    #[test]
    fn missing_kernel_files_are_unknown_state() {
        let nothing = KernelView {
            stat: None,
            syscall: None,
            wchan: None,
        };
        assert_eq!(nothing.describe(), "in an unknown state");
    }
}
