// SPDX-License-Identifier: GPL-2.0-or-later

//! QEMU's plugin API, version 7 as QEMU 11.1 has it, as far as it is needed, behind safe functions.
//! All unsafe code of this crate is here.
//!
//! A [`Vcpu`] exists only while QEMU runs a callback on that virtual processor's thread, and only
//! there its registers and its memory can be reached. A callback answers where the processor goes
//! on; the jump out of the callback is made here, when nothing of Rust is left on the stack that
//! would have to be dropped.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use crate::machine;

/// Version of QEMU's plugin API for which the plugin is written; QEMU reads it.
#[unsafe(no_mangle)]
pub static qemu_plugin_version: c_int = 7;

#[repr(C)]
struct GByteArray {
    data: *mut u8,
    len: c_uint,
}

/// A `GArray`; the API's elements are [`Descriptor`]s.
#[repr(C)]
struct GArray {
    data: *mut c_char,
    len: c_uint,
}

#[repr(C)]
struct Descriptor {
    handle: *mut c_void,
    name: *const c_char,
    feature: *const c_char,
    is_readonly: bool,
}

/// `qemu_plugin_u64`: a 64-bit word per virtual processor.
#[repr(C)]
#[derive(Clone, Copy)]
struct Word {
    score: *mut c_void,
    offset: usize,
}

/// `QEMU_PLUGIN_CB_RW_REGS_PC` of `enum qemu_plugin_cb_flags`: every callback may read and write
/// registers and go elsewhere.
const WRITE_REGISTERS_AND_PC: c_int = 3;
/// `QEMU_PLUGIN_COND_NE`: the callback is called if the word is not equal to the given value.
const NOT_EQUAL: c_int = 3;

type VcpuCallback = extern "C" fn(c_uint, *mut c_void);

unsafe extern "C" {
    fn g_byte_array_new() -> *mut GByteArray;
    fn g_byte_array_append(array: *mut GByteArray, data: *const u8, len: c_uint)
    -> *mut GByteArray;
    fn g_byte_array_free(array: *mut GByteArray, free_segment: c_int) -> *mut u8;
    fn g_array_free(array: *mut GArray, free_segment: c_int) -> *mut c_char;
    fn qemu_plugin_register_vcpu_init_cb(id: u64, cb: VcpuCallback, data: *mut c_void);
    fn qemu_plugin_register_atexit_cb(id: u64, cb: extern "C" fn(*mut c_void), data: *mut c_void);
    fn qemu_plugin_register_vcpu_tb_trans_cb(
        id: u64,
        cb: extern "C" fn(*mut c_void, *mut c_void),
        data: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_insn_exec_cb(
        insn: *mut c_void,
        cb: VcpuCallback,
        flags: c_int,
        data: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_insn_exec_cond_cb(
        insn: *mut c_void,
        cb: VcpuCallback,
        flags: c_int,
        cond: c_int,
        entry: Word,
        imm: u64,
        data: *mut c_void,
    );
    fn qemu_plugin_register_vcpu_tb_exec_cond_cb(
        tb: *mut c_void,
        cb: VcpuCallback,
        flags: c_int,
        cond: c_int,
        entry: Word,
        imm: u64,
        data: *mut c_void,
    );
    fn qemu_plugin_tb_n_insns(tb: *const c_void) -> usize;
    fn qemu_plugin_tb_vaddr(tb: *const c_void) -> u64;
    fn qemu_plugin_tb_get_insn(tb: *const c_void, index: usize) -> *mut c_void;
    fn qemu_plugin_insn_data(insn: *const c_void, into: *mut c_void, len: usize) -> usize;
    fn qemu_plugin_insn_vaddr(insn: *const c_void) -> u64;
    fn qemu_plugin_get_registers() -> *mut GArray;
    fn qemu_plugin_read_register(handle: *mut c_void, into: *mut GByteArray) -> bool;
    fn qemu_plugin_write_register(handle: *mut c_void, from: *mut GByteArray) -> bool;
    fn qemu_plugin_set_pc(vaddr: u64) -> !;
    fn qemu_plugin_read_memory_vaddr(address: u64, into: *mut GByteArray, len: usize) -> bool;
    fn qemu_plugin_write_memory_vaddr(address: u64, from: *mut GByteArray) -> bool;
    fn qemu_plugin_read_memory_hwaddr(address: u64, into: *mut GByteArray, len: usize) -> c_int;
    fn qemu_plugin_write_memory_hwaddr(address: u64, from: *mut GByteArray) -> c_int;
    fn qemu_plugin_scoreboard_new(size: usize) -> *mut c_void;
    fn qemu_plugin_u64_set(entry: Word, vcpu: c_uint, value: u64);
    fn qemu_plugin_num_vcpus() -> c_int;
}

/// A byte array of GLib's; freed when dropped.
struct Bytes(*mut GByteArray);

impl Bytes {
    fn new() -> Bytes {
        // SAFETY: no arguments; GLib aborts rather than answer null.
        Bytes(unsafe { g_byte_array_new() })
    }

    fn of(bytes: &[u8]) -> Bytes {
        let array = Bytes::new();
        let len = c_uint::try_from(bytes.len()).unwrap_or(c_uint::MAX);
        // SAFETY: the array is ours, and `bytes` holds at least `len` bytes, which are copied.
        unsafe { g_byte_array_append(array.0, bytes.as_ptr(), len) };
        array
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: the array is ours and alive.
        let array = unsafe { &*self.0 };
        if array.data.is_null() {
            return &[];
        }
        // SAFETY: GLib keeps `len` initialised bytes at `data`; nobody changes the array
        // while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(array.data, array.len as usize) }
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: the array is ours and not used any more.
        unsafe { g_byte_array_free(self.0, 1) };
    }
}

/// A processor register that the plugin accesses, of 64 bits except for the prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Register {
    /// A general register, by its number 0-15.
    General(u8),
    /// Control register 6, the mask of interruption subclasses that the processor accepts.
    Control6,
    /// The left half of the PSW. The right half is not reliable within a block;
    /// callbacks get the address.
    PswMask,
    /// The prefix register, the address of the processor's prefix area.
    Prefix,
}

impl Register {
    /// By its name in QEMU's gdb descriptions.
    fn by_name(name: &str) -> Option<Register> {
        match name {
            "cr6" => Some(Register::Control6),
            "pswm" => Some(Register::PswMask),
            "prefix" => Some(Register::Prefix),
            _ => {
                let number = name.strip_prefix('r')?.parse().ok()?;
                (number < 16).then_some(Register::General(number))
            }
        }
    }
}

/// Number of registers in [`Register`].
const REGISTER_COUNT: usize = 19;

/// Handles of the registers. They are numbers in disguise, the same for all processors of a kind.
static REGISTERS: OnceLock<HashMap<Register, usize>> = OnceLock::new();

/// The word that makes a processor call [`machine`] at the next block: address of the scoreboard.
static ATTENTION: OnceLock<usize> = OnceLock::new();

thread_local! {
    /// Whether this thread is in a callback of a virtual processor.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

fn attention() -> Option<Word> {
    let score = *ATTENTION.get()? as *mut c_void;
    Some(Word { score, offset: 0 })
}

/// Makes every processor call [`machine::at_block`] at its next block, or ends that.
pub(crate) fn call_all(on: bool) {
    // SAFETY: no arguments.
    let count = unsafe { qemu_plugin_num_vcpus() };
    for index in 0..c_uint::try_from(count).unwrap_or(0) {
        call(index, on);
    }
}

/// Sets or clears the word that requests callbacks of processor `index` at its next block.
pub(crate) fn call(index: u32, on: bool) {
    if let Some(word) = attention() {
        // SAFETY: the scoreboard is never freed, and has a place for every
        // processor that QEMU has counted.
        unsafe { qemu_plugin_u64_set(word, index, u64::from(on)) };
    }
}

/// A virtual processor that is in a callback of the plugin.
#[derive(Debug)]
pub(crate) struct Vcpu {
    index: u32,
}

impl Vcpu {
    /// Returns QEMU's number of the processor.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Returns the value of a register.
    pub(crate) fn read(&self, register: Register) -> u64 {
        let Some(handle) = REGISTERS.get().and_then(|all| all.get(&register)) else {
            return 0;
        };
        let bytes = Bytes::new();
        // SAFETY: a `Vcpu` exists only in a callback that may read registers;
        // the handle is QEMU's own.
        let done = unsafe { qemu_plugin_read_register(*handle as *mut c_void, bytes.0) };
        let big_endian = bytes.as_slice().iter();
        let value = big_endian.fold(0, |value, byte| value << 8 | u64::from(*byte));
        if done { value } else { 0 }
    }

    /// Writes a register of 64 bits.
    pub(crate) fn write(&mut self, register: Register, value: u64) {
        if let Some(handle) = REGISTERS.get().and_then(|all| all.get(&register)) {
            let bytes = Bytes::of(&value.to_be_bytes());
            // SAFETY: a `Vcpu` exists only in a callback that may write registers; 8 bytes are as
            // long as every register that is written.
            unsafe { qemu_plugin_write_register(*handle as *mut c_void, bytes.0) };
        }
    }

    /// Loads bytes from a virtual address of the guest; returns false if that is not possible.
    pub(crate) fn load(&self, address: u64, into: &mut [u8]) -> bool {
        if into.is_empty() {
            return true;
        }
        let bytes = Bytes::new();
        // SAFETY: called on the processor's thread; the array grows as needed.
        let done = unsafe { qemu_plugin_read_memory_vaddr(address, bytes.0, into.len()) };
        done && copy(&bytes, into)
    }

    /// Stores bytes at a virtual address of the guest; returns false if that is not possible.
    pub(crate) fn store(&mut self, address: u64, bytes: &[u8]) -> bool {
        let array = Bytes::of(bytes);
        // SAFETY: called on the processor's thread; the array holds the bytes.
        bytes.is_empty() || unsafe { qemu_plugin_write_memory_vaddr(address, array.0) }
    }
}

/// Loads from an absolute address; false also when this thread runs no virtual processor.
pub(crate) fn load_absolute(address: u64, into: &mut [u8]) -> bool {
    if !IN_CALLBACK.get() || into.is_empty() {
        return into.is_empty();
    }
    let bytes = Bytes::new();
    // SAFETY: called on a processor's thread, in its callback.
    let result = unsafe { qemu_plugin_read_memory_hwaddr(address, bytes.0, into.len()) };
    result == 0 && copy(&bytes, into)
}

/// Stores at an absolute address; false also when this thread runs no virtual processor.
pub(crate) fn store_absolute(address: u64, bytes: &[u8]) -> bool {
    if !IN_CALLBACK.get() || bytes.is_empty() {
        return bytes.is_empty();
    }
    let array = Bytes::of(bytes);
    // SAFETY: called on a processor's thread, in its callback at execution and not at translation.
    unsafe { qemu_plugin_write_memory_hwaddr(address, array.0) == 0 }
}

fn copy(bytes: &Bytes, into: &mut [u8]) -> bool {
    let from = bytes.as_slice().get(..into.len());
    from.map(|from| into.copy_from_slice(from)).is_some()
}

/// Runs a handler for a processor, then continues at the address that the handler returns.
fn enter(index: c_uint, data: *mut c_void, handler: fn(&mut Vcpu, u64) -> Option<u64>) {
    IN_CALLBACK.set(true);
    let next = handler(&mut Vcpu { index }, data as u64);
    IN_CALLBACK.set(false);
    if let Some(next) = next {
        // SAFETY: the callback was registered as one that writes registers and the program
        // counter. This leaves by longjmp: the frames here and in the callers hold no
        // value that has to be dropped.
        unsafe { qemu_plugin_set_pc(next) }
    }
}

extern "C" fn on_ap(index: c_uint, data: *mut c_void) {
    enter(index, data, machine::at_ap);
}

extern "C" fn on_facilities(index: c_uint, data: *mut c_void) {
    enter(index, data, machine::at_facilities);
}

extern "C" fn on_load_psw(index: c_uint, data: *mut c_void) {
    enter(index, data, machine::at_load_psw);
}

extern "C" fn on_block(index: c_uint, data: *mut c_void) {
    enter(index, data, machine::at_block);
}

extern "C" fn after_facilities(index: c_uint, data: *mut c_void) {
    enter(index, data, machine::after_facilities);
}

/// Looks through a block that QEMU translates, and asks to be called where it matters. Callbacks
/// get the instruction's address for data.
extern "C" fn on_translation(block: *mut c_void, _data: *mut c_void) {
    let Some(word) = attention() else { return };
    // SAFETY: the block is valid for the time of this callback.
    let start = unsafe { qemu_plugin_tb_vaddr(block) } as *mut c_void;
    // SAFETY: as above.
    let count = unsafe { qemu_plugin_tb_n_insns(block) };
    let write = WRITE_REGISTERS_AND_PC;
    // SAFETY: as above; the callback and the scoreboard live as long as QEMU.
    unsafe {
        qemu_plugin_register_vcpu_tb_exec_cond_cb(block, on_block, write, NOT_EQUAL, word, 0, start)
    };
    let mut stored = false;
    for i in 0..count {
        let mut code = [0_u8; 6];
        // SAFETY: `i` is below the number of instructions.
        let insn = unsafe { qemu_plugin_tb_get_insn(block, i) };
        // SAFETY: `insn` is valid for the time of this callback; up to 6
        // bytes are written into `code`.
        let len = unsafe { qemu_plugin_insn_data(insn, code.as_mut_ptr().cast(), code.len()) };
        // SAFETY: as above.
        let at = unsafe { qemu_plugin_insn_vaddr(insn) } as *mut c_void;
        if stored {
            // SAFETY: as above.
            unsafe {
                qemu_plugin_register_vcpu_insn_exec_cond_cb(
                    insn,
                    after_facilities,
                    write,
                    NOT_EQUAL,
                    word,
                    0,
                    at,
                )
            };
        }
        let kind = machine::classify(code.get(..len).unwrap_or(&code));
        stored = kind == Some(machine::Site::Facilities);
        match kind {
            Some(machine::Site::Ap) => {
                // SAFETY: as above.
                unsafe { qemu_plugin_register_vcpu_insn_exec_cb(insn, on_ap, write, at) };
            }
            Some(machine::Site::Facilities) => {
                // SAFETY: as above.
                unsafe { qemu_plugin_register_vcpu_insn_exec_cb(insn, on_facilities, write, at) };
            }
            Some(machine::Site::LoadPsw) => {
                // SAFETY: as above.
                unsafe {
                    qemu_plugin_register_vcpu_insn_exec_cond_cb(
                        insn,
                        on_load_psw,
                        write,
                        NOT_EQUAL,
                        word,
                        0,
                        at,
                    )
                };
            }
            None => {}
        }
    }
}

/// QEMU's callback for a new virtual processor. Looks up the register handles at the first one;
/// they are valid for all.
extern "C" fn on_vcpu(_index: c_uint, _data: *mut c_void) {
    let registers = REGISTERS.get_or_init(|| {
        let mut all = HashMap::new();
        // SAFETY: called on the processor's thread after it was initialised, as the API asks.
        let array = unsafe { qemu_plugin_get_registers() };
        if array.is_null() {
            return all;
        }
        // SAFETY: QEMU answers a valid array.
        let GArray { data, len } = unsafe { &*array };
        if !data.is_null() {
            // SAFETY: the array's elements are descriptors, suitably aligned by malloc.
            let descriptors =
                unsafe { std::slice::from_raw_parts(data.cast::<Descriptor>(), *len as usize) };
            for descriptor in descriptors {
                // SAFETY: names are strings that live as long as QEMU.
                let name = unsafe { CStr::from_ptr(descriptor.name) };
                let register = name.to_str().ok().and_then(Register::by_name);
                all.extend(register.map(|register| (register, descriptor.handle as usize)));
            }
        }
        // SAFETY: the array is the caller's to free, and not used any more.
        unsafe { g_array_free(array, 1) };
        all
    });
    if registers.len() != REGISTER_COUNT {
        eprintln!("ap: this QEMU lacks registers of an s390x machine");
        std::process::exit(1);
    }
}

extern "C" fn on_exit(_data: *mut c_void) {
    machine::at_exit();
}

/// QEMU's entry: reads the arguments and registers the callbacks. Anything but 0 refuses to load.
///
/// # Safety
/// `argv` must hold `argc` strings, as QEMU passes them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: u64,
    _info: *const c_void,
    argc: c_int,
    argv: *mut *mut c_char,
) -> c_int {
    let count = usize::try_from(argc).unwrap_or(0);
    let mut arguments = Vec::new();
    if count > 0 && !argv.is_null() {
        // SAFETY: `argv` holds `argc` pointers.
        let pointers = unsafe { std::slice::from_raw_parts(argv, count) };
        for pointer in pointers {
            // SAFETY: QEMU passes strings.
            let argument = unsafe { CStr::from_ptr(*pointer) };
            arguments.push(argument.to_string_lossy().into_owned());
        }
    }
    if let Err(error) = machine::start(&arguments) {
        eprintln!("ap: {error}");
        return 1;
    }
    // SAFETY: a scoreboard of one word for each processor; it is never freed.
    let score = unsafe { qemu_plugin_scoreboard_new(size_of::<u64>()) };
    ATTENTION.get_or_init(|| score as usize);
    let none = std::ptr::null_mut();
    // SAFETY: `id` is this plugin's; the callbacks live as long as QEMU.
    unsafe { qemu_plugin_register_vcpu_init_cb(id, on_vcpu, none) };
    // SAFETY: as above.
    unsafe { qemu_plugin_register_atexit_cb(id, on_exit, none) };
    // SAFETY: as above.
    unsafe { qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation, none) };
    0
}
