//! Option tables of namespaces and the process, and options that several tables have.
//!
//! The table of a kind of disk lies beside its structure, in [`crate::disk`]. A new option is a row
//! of a table, and a field of the structure that it sets.

mod namespace;
mod process;

use super::{Flag, Row, Setting};

/// Returns the option `socket`: the path of the socket that a VMM connects to.
pub(crate) const fn socket<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "Unix socket to listen on; created with mode 0600, replaces a stale one";
    Row::new("socket", "PATH", help, setting).required()
}

/// Access options of a socket. A configuration file sets them for each socket, and in `[process]`
/// the defaults.
pub(crate) const fn socket_owner<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "owner of the socket, a user name or number";
    let flag = Flag::default("socket-owner");
    Row::new("socket-owner", "USER", help, setting)
        .or("the user of the process")
        .serve(flag.help("owner of the sockets, a user name or number"))
}

pub(crate) const fn socket_group<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "group of the socket, a name or number; may connect unless socket-mode forbids it";
    Row::new("socket-group", "GROUP", help, setting)
        .or("the group of the process")
        .serve(Flag::default("socket-group"))
}

pub(crate) const fn socket_mode<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "access mode of the socket in octal digits, such as 0660";
    Row::new("socket-mode", "MODE", help, setting)
        .or("0600, with a group 0660")
        .serve(Flag::default("socket-mode"))
}

pub(crate) const fn name<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "name of the disk in \"vnvme list\" and in every command for one disk; unique in \
                the process";
    Row::new("name", "TEXT", help, setting)
}

pub(crate) const fn volume<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "path or URL, or a table of the URL and its options, { url = \"a.raw\", iops = 1000 \
                }";
    Row::new("volume", "URL", help, setting).required()
}

pub(crate) const fn read_only<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let flag = Flag::overrides("read-only").short('r');
    Row::new("read-only", "on|off", "refuse writes", setting)
        .or("off")
        .serve(flag.help("refuse writes to every volume"))
        .ublk(flag)
}

pub(crate) const fn block_size<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let flag = Flag::default("block-size").short('b');
    Row::new(
        "block-size",
        "512|4096",
        "logical block size in bytes",
        setting,
    )
    .or("that of the volume, at least 512")
    .in_url()
    .serve(flag.help("logical block size of every volume, in bytes"))
    .ublk(flag)
}

pub(crate) const fn on_read_error<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "error policy for reads: report the error to the guest, retry for 20 s, or stop the \
                disk until \"vnvme resume\"";
    let flag = Flag::default("on-read-error");
    Row::new("on-read-error", "report|retry|stop", help, setting)
        .or("report")
        .in_url()
        .serve(flag)
        .ublk(flag)
}

pub(crate) const fn on_write_error<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "error policy for writes, zeroing and deallocation, as for reads; enospc-stop stops \
                the disk when space runs out and reports other errors. A failed flush is always \
                reported";
    let flag = Flag::default("on-write-error");
    let form = "report|retry|stop|enospc-stop";
    Row::new("on-write-error", form, help, setting)
        .or("report")
        .in_url()
        .serve(flag)
        .ublk(flag)
}

pub(crate) const fn write_cache<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "volatile write cache; off makes every write durable when it completes";
    let flag = Flag::overrides("no-write-cache");
    Row::new("write-cache", "on|off", help, setting)
        .or("on")
        .serve(flag.help(
            "start with the volatile write cache off: every write is durable when it completes",
        ))
}

pub(crate) const fn model<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "model number, up to 40 characters";
    Row::new("model", "TEXT", help, setting)
        .or("vnvme virtual NVMe disk")
        .serve(Flag::default("model"))
}

pub(crate) const fn serial<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "serial number, up to 20 characters";
    Row::new("serial", "TEXT", help, setting)
        .or("derived from the volumes, stable")
        .serve(Flag::refused("serial", "names one controller"))
}

pub(crate) const fn firmware<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "firmware revision, up to 8 characters";
    Row::new("firmware", "TEXT", help, setting)
        .or("version of vnvme")
        .serve(Flag::default("firmware"))
}

pub(crate) const fn subnqn<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    Row::new("subnqn", "NQN", "NVM subsystem NQN", setting)
        .or("derived from the serial number")
        .serve(Flag::refused("subnqn", "names one controller"))
}

pub(crate) const fn mdts<S>(setting: fn(&mut S) -> &mut dyn Setting) -> Row<S> {
    let help = "maximum data transfer size (MDTS): 4 KiB times two to the power of N";
    Row::new("mdts", "N", help, setting)
        .or("8")
        .serve(Flag::default("mdts"))
}
