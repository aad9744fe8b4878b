//! System call filters of the process.
//!
//! Three filters are installed, and the strictest result applies (seccomp(2)):
//!
//! - [`lists::NEVER`]: a process that makes one of these calls has been compromised. The kernel
//!   ends it.
//! - clone3: its flags are in memory, where no filter can see them. It "does not exist" (ENOSYS),
//!   and libc falls back to clone with visible flags: threads are allowed, processes are not.
//! - The list of needed calls ([`lists::ALWAYS`], and the rules of this module). Any other call
//!   fails with EPERM: an unforeseen call fails as it would for lack of a right, and the clients of
//!   the process are served on.
//!
//! Requests through io_uring are no system calls, and no filter sees them. Landlock restricts the
//! rings as it restricts the threads that created them. No further rings can be created, since
//! io_uring_setup is not on the list.

mod lists;

use crate::{Connect, Error, Needs};
use libc::{c_long, c_ulong};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter_all_threads,
};
use std::collections::BTreeMap;

/// Type of the ioctls of VFIO and iommufd, in bits 15:8 of their numbers (`linux/vfio.h`).
const VFIO_TYPE: u64 = b';' as u64;

/// Mask of a socket's type without its flags (`SOCK_TYPE_MASK`, `linux/net.h`).
const SOCK_TYPE: u64 = 0xf;

/// Filter rules by system call number. A call without rules is allowed with any arguments.
type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Returns whether there are lists for this architecture, and the kernel was built with seccomp
/// (prctl(2), PR_GET_SECCOMP).
pub(crate) fn is_known() -> bool {
    architecture().is_some() && rustix::thread::secure_computing_mode().is_ok()
}

fn architecture() -> Option<TargetArch> {
    TargetArch::try_from(std::env::consts::ARCH).ok()
}

/// Installs the system call filters in all threads. `holds` is whether Landlock restricts opening
/// files.
pub(crate) fn install(needs: &Needs, holds: bool) -> Result<(), Error> {
    let never = plain(lists::NEVER);
    let clone3 = plain(&[libc::SYS_clone3]);
    let unknown = SeccompAction::Errno(libc::ENOSYS as u32);
    let refused = SeccompAction::Errno(libc::EPERM as u32);
    // The order matters: the last filter refuses the installation of filters.
    for (rules, others, these) in [
        (never, SeccompAction::Allow, SeccompAction::KillProcess),
        (clone3, SeccompAction::Allow, unknown),
        (allowed(needs, holds)?, refused, SeccompAction::Allow),
    ] {
        apply_filter_all_threads(&program(rules, others, these)?)?;
    }
    Ok(())
}

/// Installs a filter in the calling thread, and its later children, that ends a process after a
/// call that no process of this program needs. Calls to start processes or to drop rights remain
/// allowed.
pub(crate) fn install_for_starter() -> Result<(), Error> {
    let needed = [libc::SYS_execve, libc::SYS_execveat, libc::SYS_capset];
    let mut never = plain(lists::NEVER);
    never.retain(|call, _| !needed.contains(call));
    let filter = program(never, SeccompAction::Allow, SeccompAction::KillProcess)?;
    Ok(seccompiler::apply_filter(&filter)?)
}

fn program(rules: Rules, others: SeccompAction, these: SeccompAction) -> Result<BpfProgram, Error> {
    let Some(architecture) = architecture() else {
        return Ok(BpfProgram::new());
    };
    let filter = SeccompFilter::new(rules, others, these, architecture)?;
    Ok(filter.try_into()?)
}

fn plain(calls: &[c_long]) -> Rules {
    calls.iter().map(|call| (*call, Vec::new())).collect()
}

/// Returns the filter rules of all system calls that the process needs.
fn allowed(needs: &Needs, holds: bool) -> Result<Rules, Error> {
    let mut rules = plain(lists::ALWAYS);
    rules.extend(plain(lists::ARCHITECTURE_CALLS));
    rules.extend(plain(&[libc::SYS_clone3]));
    let process = rustix::process::getpid().as_raw_nonzero().get();
    // Executable memory can neither be created nor changed.
    let no_code = || argument(2).has(libc::PROT_EXEC as u64, 0);
    rules.insert(libc::SYS_mmap, vec![no_code()?]);
    rules.insert(libc::SYS_mprotect, vec![no_code()?]);
    // Threads, not processes.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![argument(0).has(thread, thread)?]);
    // Signals to itself are allowed: the end by a signal's default action, abort.
    let itself = argument(0).is(process as u64)?;
    rules.insert(libc::SYS_tgkill, vec![itself]);
    // Connected pairs of sockets are allowed, and no other sockets. A datagram can be sent to any
    // socket with a path, even from a connected socket.
    let pairs = [libc::SOCK_STREAM, libc::SOCK_SEQPACKET].map(|kind| {
        let unix = condition(0, SeccompCmpOp::Eq, libc::AF_UNIX as u64)?;
        let kind = condition(1, SeccompCmpOp::MaskedEq(SOCK_TYPE), kind as u64)?;
        Ok::<_, Error>(SeccompRule::new(vec![unix, kind])?)
    });
    rules.insert(
        libc::SYS_socketpair,
        pairs.into_iter().collect::<Result<_, _>>()?,
    );
    sockets(needs, &mut rules)?;
    // Setting the recipient of a file's signals (F_SETOWN) is not allowed, since it could be any
    // process.
    let commands = lists::FCNTL.iter();
    let commands = commands.map(|command| argument(1).is_word(*command as u64));
    rules.insert(libc::SYS_fcntl, commands.collect::<Result<_, _>>()?);
    // Affinity of the calling thread only: otherwise all processes of the user could be moved to
    // one CPU.
    rules.insert(libc::SYS_sched_setaffinity, vec![argument(0).is_word(0)?]);
    // Limits may be read, not set: the argument for a new one must be null.
    rules.insert(libc::SYS_prlimit64, vec![argument(2).is(0)?]);
    // Names of threads and, by malloc, of mappings; and the slack of timers.
    let options = [libc::PR_SET_NAME, libc::PR_SET_VMA, libc::PR_SET_TIMERSLACK];
    let options = options.map(|option| argument(0).is_word(option as u64));
    rules.insert(
        libc::SYS_prctl,
        options.into_iter().collect::<Result<_, _>>()?,
    );
    // FICLONERANGE shares the blocks of one open file with another.
    let mut ioctls = Vec::new();
    for command in [
        c_ulong::from(libc::FIONBIO),
        c_ulong::from(libc::FICLONERANGE),
    ] {
        ioctls.push(argument(1).is_word(command)?);
    }
    if needs.vfio {
        ioctls.push(argument(1).has_word(0xff00, VFIO_TYPE << 8)?);
    }
    if needs.takes_over {
        ioctls.push(argument(1).is_word(c_ulong::from(libc::FIONREAD))?);
        rules.extend(plain(&[libc::SYS_listen]));
    }
    let makes = !needs.open_below.is_empty() || !needs.files_in.is_empty();
    let opens = makes || !needs.read_below.is_empty();
    if opens || (needs.reopen && holds) {
        rules.extend(plain(lists::OPENING));
    }
    if makes {
        rules.extend(plain(lists::RENAMING));
    }
    if !needs.open_below.is_empty() {
        rules.extend(plain(lists::LISTENING));
        // Permissions of a new socket, and of the lock file beside it: read and write bits only. A
        // file that runs with this user's rights is excluded.
        let mode = argument(1).has_word(!0o777 & u64::from(u32::MAX), 0)?;
        rules.insert(libc::SYS_fchmod, vec![mode]);
        for command in lists::DEVICE_IOCTLS {
            ioctls.push(argument(1).is_word(*command)?);
        }
    }
    rules.insert(libc::SYS_ioctl, ioctls);
    if needs.library {
        rules.extend(plain(lists::LIBRARY));
    }
    if needs.ublk {
        rules.insert(libc::SYS_io_uring_setup, Vec::new());
    }
    Ok(rules)
}

/// Stream sockets of the needed families, to listen or to connect. Landlock limits the addresses.
fn sockets(needs: &Needs, rules: &mut Rules) -> Result<(), Error> {
    let mut families = Vec::new();
    for connect in &needs.connect {
        match connect {
            Connect::Tcp(_) => families.extend([libc::AF_INET, libc::AF_INET6]),
            Connect::UnixIn(_) => families.push(libc::AF_UNIX),
        }
    }
    if !families.is_empty() {
        rules.extend(plain(&[libc::SYS_connect]));
    }
    if !needs.open_below.is_empty() {
        families.push(libc::AF_UNIX);
    }
    families.sort_unstable();
    families.dedup();
    let stream = libc::SOCK_STREAM as u64;
    let rule = |family: libc::c_int| {
        let family = condition(0, SeccompCmpOp::Eq, family as u64)?;
        let kind = condition(1, SeccompCmpOp::MaskedEq(SOCK_TYPE), stream)?;
        Ok::<_, Error>(SeccompRule::new(vec![family, kind])?)
    };
    let sockets = families.into_iter().map(rule);
    let sockets: Vec<SeccompRule> = sockets.collect::<Result<_, _>>()?;
    if !sockets.is_empty() {
        rules.insert(libc::SYS_socket, sockets);
    }
    Ok(())
}

/// Returns a filter condition on the lower 32 bits of an argument.
fn condition(number: u8, compare: SeccompCmpOp, value: u64) -> Result<SeccompCondition, Error> {
    Ok(SeccompCondition::new(
        number,
        SeccompCmpArgLen::Dword,
        compare,
        value,
    )?)
}

/// Argument of a system call by its index, for filter rules.
#[derive(Clone, Copy)]
struct Argument(u8);

fn argument(number: u8) -> Argument {
    Argument(number)
}

impl Argument {
    fn rule(
        self,
        len: SeccompCmpArgLen,
        compare: SeccompCmpOp,
        value: u64,
    ) -> Result<SeccompRule, Error> {
        let condition = SeccompCondition::new(self.0, len, compare, value)?;
        Ok(SeccompRule::new(vec![condition])?)
    }

    /// Returns the rule that the argument has exactly this value.
    fn is(self, value: u64) -> Result<SeccompRule, Error> {
        self.rule(SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)
    }

    /// Matches this value in the lower half, which is all that the kernel reads.
    fn is_word(self, value: u64) -> Result<SeccompRule, Error> {
        self.rule(SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
    }

    /// Returns the rule that the masked bits of the argument have this value.
    fn has(self, mask: u64, value: u64) -> Result<SeccompRule, Error> {
        self.rule(SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(mask), value)
    }

    /// Returns the rule that the masked bits of the argument's lower 32 bits have this value.
    fn has_word(self, mask: u64, value: u64) -> Result<SeccompRule, Error> {
        self.rule(SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask), value)
    }
}
