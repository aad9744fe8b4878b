//! What each attempt must end with.

use crate::Step::{Both, Enter, Later, Seal, Starter, Thread};
use crate::files::*;
use crate::others::*;
use crate::*;

/// Files, by Landlock.
pub const FILES: &[Case] = &[
    case("read", read_file, Enter, DENIED),
    case("read a system file", read_passwd, Enter, DENIED),
    case("write", write_file, Enter, DENIED),
    case("truncate", truncate_file, Enter, DENIED),
    case("create", create_file, Enter, DENIED),
    case("make a directory", make_directory, Enter, DENIED),
    case("list", list_directory, Enter, DENIED),
    case("rename", rename_file, Enter, DENIED),
    case("remove elsewhere", remove_elsewhere, Enter, DENIED),
    case(
        "remove where it may",
        remove_where_allowed,
        Enter,
        End::Done,
    ),
    case(
        "read where it may remove",
        read_where_allowed,
        Enter,
        DENIED,
    ),
    case(
        "read where it may read",
        read_where_it_may,
        Enter,
        End::Done,
    ),
    case(
        "write where it may read",
        write_where_it_may_read,
        Enter,
        DENIED,
    ),
    case(
        "make a socket where it may remove",
        socket_where_allowed,
        Enter,
        DENIED,
    ),
    case("execute", execute, Enter, DENIED),
    case("read in a thread", read_in_thread, Enter, DENIED),
    case("read by a ring", read_by_ring, Enter, DENIED),
    case(
        "read by a ring's worker",
        read_by_ring_worker,
        Enter,
        DENIED,
    ),
    case("read by a polled ring", read_by_polled_ring, Enter, DENIED),
    case("read, early thread", read_file, Thread, DENIED),
    case("connect, early thread", connect_tcp, Thread, DENIED),
];

/// What is opened later, by Landlock and by the list of calls: each is tried with all that a
/// process keeps which serves more while it runs ([`Needs::open_below`], [`Needs::read_below`]).
pub const LATER: &[Case] = &[
    case("read below", later_read, Later, End::Done),
    case("write below", later_write, Later, End::Done),
    case("create below", later_create, Later, End::Done),
    case("replace below", later_replace, Later, End::Done),
    case("remove below", later_remove, Later, End::Done),
    case("list below", later_list, Later, End::Done),
    case("listen below", later_listen, Later, End::Done),
    case("connect below", later_connect, Later, End::Done),
    case("read a file of the list", later_read_one, Later, End::Done),
    case("read beside it", later_read_beside, Later, DENIED),
    case("read outside", read_file, Later, DENIED),
    case("read a system file", read_passwd, Later, DENIED),
    case("write outside", write_file, Later, DENIED),
    case("create outside", create_file, Later, DENIED),
    case("list outside", list_directory, Later, DENIED),
    case("remove outside", remove_elsewhere, Later, DENIED),
    case("listen outside", later_listen_outside, Later, DENIED),
    case("read by a link", later_read_link, Later, DENIED),
    case("write by a link", later_write_link, Later, DENIED),
    case("read by dots", later_read_dots, Later, DENIED),
    case("write by dots", later_write_dots, Later, DENIED),
    case("move out", later_move_out, Later, DENIED),
    case("move in", later_move_in, Later, DENIED),
    // EXDEV: for Landlock another directory is another file system.
    case("move between directories", later_move, Later, ELSEWHERE),
    case("a second name inside", later_link_in, Later, FORBIDDEN),
    case("a link", later_symlink, Later, FORBIDDEN),
    case("a directory", later_directory, Later, FORBIDDEN),
    case("a FIFO", later_fifo, Later, FORBIDDEN),
    case("a device", later_device, Later, FORBIDDEN),
    case("execute below", execute_here, Later, End::Killed),
    case("read where it may read", later_read_only, Later, End::Done),
    case("write there", later_write_read_only, Later, DENIED),
    case("create there", later_create_read_only, Later, DENIED),
    case("remove there", later_remove_read_only, Later, DENIED),
    case("another owner", later_owner, Later, FORBIDDEN),
    case(
        "another mode by a path",
        later_mode_by_path,
        Later,
        FORBIDDEN,
    ),
    case("a mode", later_mode, Later, End::Done),
    case(
        "a mode of another user's rights",
        later_set_user,
        Later,
        FORBIDDEN,
    ),
    case("TCP", connect_tcp, Later, FORBIDDEN),
    case("UDP", udp, Later, FORBIDDEN),
    case("abstract socket", connect_abstract, Later, FORBIDDEN),
    case("datagrams", later_datagrams, Later, FORBIDDEN),
    case("a ring", ring, Later, FORBIDDEN),
    case("input to the terminal", terminal, Later, FORBIDDEN),
    case("a process", fork, Later, FORBIDDEN),
];

/// The network and other processes, by Landlock.
pub const OTHERS: &[Case] = &[
    case("connect", connect_tcp, Enter, DENIED),
    case("listen", listen_tcp, Enter, DENIED),
    case(
        "connect to an abstract socket",
        connect_abstract,
        Enter,
        FORBIDDEN,
    ),
    case("signal", signal, Enter, FORBIDDEN),
];

/// Capabilities and limits.
pub const RIGHTS: &[Case] = &[
    with(
        CapabilitySet::CHOWN,
        case("change an owner", change_owner, Enter, FORBIDDEN),
    ),
    with(
        CapabilitySet::SYS_CHROOT,
        case("change the root", change_root, Enter, FORBIDDEN),
    ),
    with(
        CapabilitySet::SYS_ADMIN,
        case("regain a capability", regain, Enter, FORBIDDEN),
    ),
    with(
        CapabilitySet::SYS_ADMIN,
        case("regain, early thread", regain, Thread, FORBIDDEN),
    ),
    with(
        CapabilitySet::SETPCAP,
        case("have one in the bounding set", bounded, Enter, FORBIDDEN),
    ),
    with(
        CapabilitySet::SYS_RESOURCE,
        case("raise a hard limit", raise_limit, Enter, FORBIDDEN),
    ),
    case("have new privileges", new_privileges, Enter, FORBIDDEN),
    case("have core dumps", core_dumps, Enter, FORBIDDEN),
    case(
        "have new privileges, early thread",
        new_privileges,
        Thread,
        FORBIDDEN,
    ),
];

/// What a process may that starts others, which need all that its user may.
pub const STARTING: &[Case] = &[
    case("read", read_file, Starter, End::Done),
    case("execute", execute, Starter, End::Done),
    case("become another program", execute_here, Starter, End::Done),
    case("have new privileges", new_privileges, Starter, FORBIDDEN),
    with(
        CapabilitySet::SYS_CHROOT,
        case("change the root", change_root, Starter, End::Killed),
    ),
];

/// System calls.
pub const CALLS: &[Case] = &[
    case("read", read_file, Seal, FORBIDDEN),
    case("list", list_directory, Seal, FORBIDDEN),
    case("read where it could", read_where_it_may, Both, FORBIDDEN),
    case("rename", rename_file, Seal, FORBIDDEN),
    case("make a directory", make_directory, Seal, FORBIDDEN),
    case("TCP", connect_tcp, Seal, FORBIDDEN),
    case("UDP", udp, Seal, FORBIDDEN),
    case("abstract socket", connect_abstract, Seal, FORBIDDEN),
    case("signal", signal, Seal, FORBIDDEN),
    case("signal to a thread", signal_thread, Seal, FORBIDDEN),
    case("a socket", a_socket, Seal, FORBIDDEN),
    case("a pair of other sockets", pair_of_others, Seal, FORBIDDEN),
    case("a pair for datagrams", pair_for_datagrams, Seal, FORBIDDEN),
    case(
        "signals of a file to another",
        owner_of_signals,
        Seal,
        FORBIDDEN,
    ),
    case("another's CPUs", affinity_of_another, Seal, FORBIDDEN),
    case("a process", fork, Seal, FORBIDDEN),
    case(
        "a process by the newer call",
        clone3,
        Seal,
        End::Refused(Errno::NOSYS),
    ),
    case("a ring", ring, Seal, FORBIDDEN),
    case("code in new memory", map_code, Seal, FORBIDDEN),
    case("code in memory", protect_code, Seal, FORBIDDEN),
    case("set a limit", set_limit, Seal, FORBIDDEN),
    case("input to the terminal", terminal, Seal, FORBIDDEN),
    case("a device's call", vfio_call, Seal, FORBIDDEN),
    case("a copy between open files", copy_file, Seal, End::Done),
    case("a reflink between open files", reflink, Seal, End::Done),
    case("become dumpable", dumpable, Seal, FORBIDDEN),
    case("another filter", filter, Seal, FORBIDDEN),
    case("become another program", execute_here, Seal, End::Killed),
    case("what serving takes", serving, Both, End::Done),
];

/// System calls that end their callers at once.
pub const NEVER: &[(&str, libc::c_long)] = &[
    ("execve", libc::SYS_execve),
    ("execveat", libc::SYS_execveat),
    ("ptrace", libc::SYS_ptrace),
    ("process_vm_readv", libc::SYS_process_vm_readv),
    ("process_vm_writev", libc::SYS_process_vm_writev),
    ("pidfd_getfd", libc::SYS_pidfd_getfd),
    ("mount", libc::SYS_mount),
    ("umount2", libc::SYS_umount2),
    ("move_mount", libc::SYS_move_mount),
    ("fsopen", libc::SYS_fsopen),
    ("pivot_root", libc::SYS_pivot_root),
    ("chroot", libc::SYS_chroot),
    ("open_by_handle_at", libc::SYS_open_by_handle_at),
    ("setns", libc::SYS_setns),
    ("unshare", libc::SYS_unshare),
    ("setuid", libc::SYS_setuid),
    ("setresgid", libc::SYS_setresgid),
    ("capset", libc::SYS_capset),
    ("bpf", libc::SYS_bpf),
    ("perf_event_open", libc::SYS_perf_event_open),
    ("userfaultfd", libc::SYS_userfaultfd),
    ("keyctl", libc::SYS_keyctl),
    ("init_module", libc::SYS_init_module),
    ("finit_module", libc::SYS_finit_module),
    ("kexec_load", libc::SYS_kexec_load),
    ("reboot", libc::SYS_reboot),
    ("swapon", libc::SYS_swapon),
    ("clock_settime", libc::SYS_clock_settime),
];
