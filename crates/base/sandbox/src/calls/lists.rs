//! Lists of system calls. CONTRIBUTING.md explains how to find missing ones.

use libc::c_long;

/// System calls that the filter allows with any arguments.
pub(super) const ALWAYS: &[c_long] = &[
    // Operations on open files. No further file can be opened.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_fallocate,
    libc::SYS_ftruncate,
    // Copies between open files, equivalent to reading and writing.
    libc::SYS_copy_file_range,
    libc::SYS_flock,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_close,
    // New pipes, and bytes between them and sockets.
    libc::SYS_pipe2,
    libc::SYS_splice,
    // Identification of a descriptor (/proc/self/fd), and the check before removing a socket's file
    // that it still belongs to this process. They also reveal the attributes of files that this
    // user can see.
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_readlinkat,
    libc::SYS_unlinkat,
    // Clients that connect to this process, not connections of its own.
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    // Waiting.
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_restart_syscall,
    // I/O on files and devices.
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    // Interrupts that cannot block (crate `eventfd`): requests to open files.
    libc::SYS_io_setup,
    libc::SYS_io_submit,
    libc::SYS_io_getevents,
    libc::SYS_io_destroy,
    // Memory; mmap and mprotect have rules.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_memfd_create,
    // Threads; clone has a rule.
    libc::SYS_futex,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_membarrier,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    // Signals; tgkill has a rule.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    // Calls of malloc, hash tables and libc's sort.
    libc::SYS_getrandom,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    libc::SYS_getrusage,
];

/// Older forms of allowed calls, which libc and rustix still use on this architecture.
#[cfg(target_arch = "x86_64")]
pub(super) const ARCHITECTURE_CALLS: &[c_long] = &[
    libc::SYS_poll,
    libc::SYS_epoll_wait,
    libc::SYS_readlink,
    libc::SYS_unlink,
];

/// Older system calls of this architecture, of which there are none.
#[cfg(not(target_arch = "x86_64"))]
pub(super) const ARCHITECTURE_CALLS: &[c_long] = &[];

/// Calls of the threads of Ceph's client library. They query their identity, and continue without
/// an answer to most further queries.
pub(super) const LIBRARY: &[c_long] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_create,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_pipe,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
];

/// Calls of a process that opens files while it runs; Landlock limits the files.
pub(super) const OPENING: &[c_long] = &[
    libc::SYS_openat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_getdents64,
];

/// Calls of a process that also creates sockets and files; socket and fchmod have rules.
pub(super) const LISTENING: &[c_long] = &[
    libc::SYS_bind,
    libc::SYS_listen,
    // Check whether another process listens on the socket.
    libc::SYS_connect,
    libc::SYS_pidfd_open,
    // Check of the lock file's owner.
    libc::SYS_geteuid,
];

/// System calls that replace a file atomically.
pub(super) const RENAMING: &[c_long] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
];

/// ioctls that are allowed on block devices: the query of the block size (`linux/fs.h`).
pub(super) const DEVICE_IOCTLS: &[u64] = &[0x1268];

/// Commands of the system call fcntl that the filter allows.
pub(super) const FCNTL: &[libc::c_int] = &[
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    // Range locks: those of volumes belong to the open file.
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    // Check of a memory file, and its seal against resizing.
    libc::F_GET_SEALS,
    libc::F_ADD_SEALS,
];

/// System calls that end the process at once.
pub(super) const NEVER: &[c_long] = &[
    // Another program.
    libc::SYS_execve,
    libc::SYS_execveat,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // Changes of the visible file system.
    libc::SYS_open_by_handle_at,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    // Changes of the user.
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setfsuid,
    libc::SYS_setfsgid,
    libc::SYS_setgroups,
    libc::SYS_capset,
    // The kernel itself.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_personality,
];
