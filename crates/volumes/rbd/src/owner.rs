//! Record of the process that owns an image's exclusive lock.
//!
//! A killed process leaves its lock, and the cluster considers it alive for half a minute. The
//! owner of the lock therefore records its identity in the image: the next process on the same
//! machine sees that the owner is dead, and need not wait.

use std::fs;
use std::path::Path;

/// Key in the image's metadata under which the lock's owner is recorded.
pub(crate) const METADATUM: &str = "vnvme.owner";

/// Identity of a process, by which another process of the same machine can check whether it is
/// alive.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    boot: String,
    /// Identifier of the PID namespace in which the process ID is valid.
    namespace: String,
    number: u32,
    /// Start time of the process, in clock ticks since boot.
    began: String,
}

impl Process {
    /// Returns the process with this ID, if it exists.
    fn of(number: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // Fields after the name, which may contain any character: field 22 of proc_pid_stat(5).
        let began = stat
            .rsplit_once(')')?
            .1
            .split_whitespace()
            .nth(19)?
            .to_owned();
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
        Some(Self {
            boot: boot.trim().to_owned(),
            namespace: namespace.display().to_string(),
            number,
            began,
        })
    }
}

/// Identity of this process, read while `/proc` is accessible; `None` if that failed.
#[derive(Debug, Clone)]
pub(crate) struct ProcessIdentity(Option<Process>);

impl ProcessIdentity {
    pub(crate) fn new() -> Self {
        Self(Process::of(std::process::id()))
    }

    /// Returns the record for the metadata of an image with a lock that `client` owns.
    pub(crate) fn record(&self, client: &str) -> Option<String> {
        let Process {
            boot,
            namespace,
            number,
            began,
        } = self.0.as_ref()?;
        Some(format!("{client} {boot} {namespace} {number} {began}"))
    }

    /// Returns the client in a record, if its process ran on this machine and is dead.
    pub(crate) fn dead(&self, record: &str) -> Option<String> {
        let mine = self.0.as_ref()?;
        let words: Vec<&str> = record.split(' ').collect();
        let &[client, boot, namespace, number, began] = words.as_slice() else {
            return None;
        };
        if boot != mine.boot || namespace != mine.namespace || !Path::new("/proc/1/stat").exists() {
            return None;
        }
        let number = number.parse().ok()?;
        let is_alive = Process::of(number).is_some_and(|process| process.began == began);
        (!is_alive).then(|| client.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dead_owners_of_this_machine_are_known_dead() {
        let me = ProcessIdentity::new();
        let record = me.record("client.7").unwrap();
        assert_eq!(me.dead(&record), None, "it is alive");
        let words: Vec<&str> = record.split(' ').collect();
        let with = |at: usize, word: &str| {
            let mut words = words.clone();
            words[at] = word;
            words.join(" ")
        };
        // The process ID belongs to another process now.
        assert_eq!(me.dead(&with(4, "1")).as_deref(), Some("client.7"));
        // A process ID that no process has.
        assert_eq!(me.dead(&with(3, "4194305")).as_deref(), Some("client.7"));
        for elsewhere in [with(1, "x"), with(2, "pid:[1]")] {
            let dead = elsewhere.replace(&format!(" {} ", std::process::id()), " 4194305 ");
            assert_eq!(me.dead(&dead), None, "{dead}");
        }
        for wrong in ["", "client.7", &with(3, "x"), &format!("{record} more")] {
            assert_eq!(me.dead(wrong), None, "{wrong}");
        }
    }
}
