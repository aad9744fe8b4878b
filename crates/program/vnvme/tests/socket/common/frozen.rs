//! A thread of another process that a tracer has stopped, while the rest of the process runs.
#![allow(unsafe_code)] // `ptrace`.

use std::ptr::null_mut;

use super::eventually;

/// The thread that made this is the tracer: it must be the one that drops it.
pub struct Frozen {
    thread: libc::pid_t,
}

fn ptrace(request: libc::c_uint, thread: libc::pid_t) -> bool {
    // SAFETY: none of the requests used here takes memory of ours.
    unsafe { libc::ptrace(request as _, thread, null_mut::<u8>(), null_mut::<u8>()) == 0 }
}

impl Frozen {
    /// Stops the thread of that name, or returns the reason why that is impossible.
    pub fn stop(process: u32, name: &str) -> Result<Self, String> {
        let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let task = tasks.flatten().find(|task| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
        });
        let task = task.expect("a thread of that name").file_name();
        let thread = task.to_str().unwrap().parse().unwrap();
        if !ptrace(libc::PTRACE_SEIZE, thread) {
            let error = std::io::Error::last_os_error();
            return Err(format!("a thread cannot be traced: {}", error.kind()));
        }
        let frozen = Self { thread };
        assert!(ptrace(libc::PTRACE_INTERRUPT, thread));
        eventually("it stops", || frozen.waited());
        Ok(frozen)
    }

    /// Returns whether the thread has stopped or ended. An ended thread is reaped.
    fn waited(&self) -> bool {
        let flags = libc::__WALL | libc::WNOHANG;
        // SAFETY: no status is wanted.
        unsafe { libc::waitpid(self.thread, null_mut(), flags) == self.thread }
    }

    /// Waits until its process has ended it.
    pub fn wait_for_its_end(self) {
        eventually("its process ends", || self.waited());
        std::mem::forget(self);
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // The thread continues.
        if !ptrace(libc::PTRACE_DETACH, self.thread) {
            let _ = self.waited();
        }
    }
}
