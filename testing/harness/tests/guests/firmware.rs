//! Firmware that finds the disk and boots from it, by its own NVMe driver.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use crate::common::Disks;
use anyhow::{Result, ensure};
use harness::image::Image;
use harness::kernel;
use harness::served::Volumes;
use harness::{Cache, Firmware, Guest};

const SECTOR: u64 = 512;

/// Where the boot sector reads its second stage from: far out, so that a wrong LBA finds nothing.
const STAGE_LBA: u64 = 1_900_000;

/// Sectors of the second stage. Sixteen cross a page boundary, so that the read
/// needs more than one PRP entry.
const STAGE_SECTORS: u8 = 16;

/// Where the second stage writes its copy to.
const COPY_LBA: u64 = 1_950_000;

/// What the second stage says, from its last sector.
const MARKER: &str = "second stage loaded through INT 13h";

/// Address that the boot sector loads the second stage to.
const STAGE_ADDRESS: u16 = 0x8000;

/// A boot sector, assembled by hand: it loads the second stage by the BIOS's
/// extended read and jumps there.
fn boot_sector() -> Vec<u8> {
    let [address_low, address_high] = STAGE_ADDRESS.to_le_bytes();
    // The disk address packet is at a fixed place in the sector.
    const PACKET: u8 = 0x60;
    let mut code = vec![
        0xfa, // cli
        0x31,
        0xc0, // xor ax, ax
        0x8e,
        0xd8, // mov ds, ax
        0x8e,
        0xc0, // mov es, ax
        0x8e,
        0xd0, // mov ss, ax
        0xbc,
        0x00,
        0x7c, // mov sp, 0x7c00
        0xfb, // sti
        0xbe,
        PACKET,
        0x7c, // mov si, 0x7c00 + PACKET
        0xb4,
        0x42, // mov ah, 0x42: extended read; dl is the drive, as the BIOS left it
        0xcd,
        0x13, // int 0x13
        0x72,
        0x05, // jc halt
        0xea,
        address_low,
        address_high,
        0x00,
        0x00, // jmp 0000:STAGE_ADDRESS
        0xf4, // halt: hlt
        0xeb,
        0xfd, // jmp halt
    ];
    code.resize(usize::from(PACKET), 0);
    code.extend(packet(STAGE_LBA));
    code.resize(510, 0);
    code.extend([0x55, 0xaa]);
    code
}

/// A disk address packet (Enhanced Disk Drive specification): size, 0, sectors,
/// offset:segment, 64-bit LBA.
fn packet(lba: u64) -> Vec<u8> {
    let mut packet = vec![16, 0, STAGE_SECTORS, 0];
    packet.extend(STAGE_ADDRESS.to_le_bytes());
    packet.extend([0, 0]);
    packet.extend(lba.to_le_bytes());
    packet
}

/// The second stage: writes itself to another place on the disk, then prints the marker on the
/// first serial port. The marker stands in its last sector, so that all sectors must have arrived.
fn second_stage() -> Vec<u8> {
    let length = usize::from(STAGE_SECTORS) * SECTOR as usize;
    let marker = length - MARKER.len() - 2;
    let [low, high] = (STAGE_ADDRESS + marker as u16).to_le_bytes();
    let mut code = vec![
        0xbe, 0x40, 0x80, // mov si, STAGE_ADDRESS + 0x40: the packet below
        0xb8, 0x00, 0x43, // mov ax, 0x4300: extended write, without verify
        0xcd, 0x13, // int 0x13
        0x72, 0x19, // jc halt: without the copy, no marker
        0xbe, low, high, // mov si, marker
        0xac, // next: lodsb
        0x84, 0xc0, // test al, al
        0x74, 0x11, // jz halt
        0x88, 0xc3, // mov bl, al
        0xba, 0xfd, 0x03, // mov dx, 0x3fd: line status of COM1
        0xec, // wait: in al, dx
        0xa8, 0x20, // test al, 0x20: transmitter empty
        0x74, 0xfb, // jz wait
        0x88, 0xd8, // mov al, bl
        0xb2, 0xf8, // mov dl, 0xf8: data of COM1
        0xee, // out dx, al
        0xeb, 0xea, // jmp next
        0xf4, // halt: hlt
        0xeb, 0xfd, // jmp halt
    ];
    code.resize(0x40, 0);
    code.extend(packet(COPY_LBA));
    code.resize(marker, 0x90);
    code.extend(MARKER.as_bytes());
    code.extend([b'\n', 0]);
    code
}

#[test]
fn seabios_boots_from_disk() -> Result<()> {
    let disks = Disks::new()?;
    let path = disks.sparse("boot.raw", 1024)?;
    let file = fs::File::options().read(true).write(true).open(&path)?;
    file.write_all_at(&boot_sector(), 0)?;
    let stage = second_stage();
    file.write_all_at(&stage, STAGE_LBA * SECTOR)?;
    let served = Volumes::file("seabios", &path).serve()?;
    let guest = Guest::builder("seabios")
        .disk(served.disk())
        .boot_from_disk()
        .boot()?;
    guest.wait_console(MARKER, Duration::from_secs(60))?;
    guest.kill()?;
    served.finish()?;
    let mut copy = vec![0; stage.len()];
    file.read_exact_at(&mut copy, COPY_LBA * SECTOR)?;
    ensure!(
        copy == stage,
        "what the guest wrote by INT 13h is not on the disk"
    );
    Ok(())
}

#[test]
fn ovmf_boots_from_disk() -> Result<()> {
    let disks = Disks::new()?;
    let path = disks.sparse("efi.raw", 256)?;
    efi_disk(&path)?;
    let served = Volumes::file("ovmf", &path).serve()?;
    let guest = Guest::builder("ovmf")
        .disk(served.disk())
        .firmware(Firmware::Ovmf)
        .boot_from_disk()
        .boot()?;
    // Said after the image, some twelve megabytes, was loaded from the filesystem and accepted.
    let console = guest.wait_console("BdsDxe: starting Boot", Duration::from_secs(180))?;
    let at = console.find("BdsDxe: starting Boot").unwrap_or(0);
    ensure!(
        console[at..].contains("NVMe("),
        "it started something else: {}",
        &console[at..]
    );
    guest.kill()?;
    served.finish()
}

/// A FAT filesystem with Debian's kernel as its removable-media boot program.
fn efi_disk(path: &Path) -> Result<()> {
    let tree = Image::get(&Cache::open()?)?.tree;
    let disk = path.display().to_string();
    let kernel = tree
        .root()
        .join("boot")
        .join(format!("vmlinuz-{}", kernel::release(&tree)?));
    tree.run("mkfs.fat", &["-F", "32", &disk])?;
    tree.run("mmd", &["-i", &disk, "::/EFI", "::/EFI/BOOT"])?;
    tree.run(
        "mcopy",
        &[
            "-i",
            &disk,
            &kernel.display().to_string(),
            "::/EFI/BOOT/BOOTX64.EFI",
        ],
    )?;
    Ok(())
}
