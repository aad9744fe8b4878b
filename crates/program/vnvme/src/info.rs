//! `vnvme info`: prints a device's identification and health, or a volume's properties.

use crate::cli::table::size;
use anyhow::{Context, Result};
use clap::Args;
use daemon::open;
use daemon::open::devices::DeviceRegistry;
use driver::{Device, Namespace};
use nvme::identify::IdentifyController;
use nvme::log::Smart;
use output::{OutputError, outln};
use serde::Serialize;
use volume::OpenOptions;

/// Options of `vnvme info`.
#[derive(Args)]
pub struct InfoArgs {
    // The kinds of volumes that are devices.
    #[arg(value_name = "URL", help = url_help())]
    url: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn url_help() -> String {
    let [pci, socket] = [driver::NVME, driver::VFIO_USER].map(|scheme| scheme.example);
    format!("device, {pci} or {socket}, with or without a namespace; or path or URL of a volume")
}

#[derive(Serialize)]
struct Info {
    url: String,
    controller: ControllerInfo,
    queues: Queues,
    namespaces: Vec<NamespaceInfo>,
    /// Health log (SMART); absent if the controller does not report it.
    health: Option<Health>,
}

#[derive(Serialize)]
struct ControllerInfo {
    model: String,
    serial: String,
    firmware: String,
    subnqn: String,
    /// Version of the NVMe specification that the controller reports.
    version: String,
    pci_vendor: String,
    controller_id: u16,
    /// Optional commands and features of the controller that the driver would use.
    features: Vec<&'static str>,
}

#[derive(Serialize)]
struct Queues {
    io_queues: u16,
    entries: u32,
    max_transfer_bytes: u64,
    page_bytes: u64,
    msix_vectors: u16,
}

#[derive(Serialize)]
struct NamespaceInfo {
    nsid: u32,
    bytes: u64,
    blocks: u64,
    block_size: u32,
    /// Size in bytes of a write that is atomic; at least one block.
    atomic_unit: u32,
    write_protected: bool,
    nguid: String,
    eui64: String,
}

#[derive(Serialize)]
struct Health {
    critical_warning: u8,
    temperature_kelvin: u16,
    available_spare_percent: u8,
    used_percent: u8,
    data_read_bytes: u128,
    data_written_bytes: u128,
    host_reads: u128,
    host_writes: u128,
    power_cycles: u128,
    power_on_hours: u128,
    unsafe_shutdowns: u128,
    media_errors: u128,
    error_log_entries: u128,
}

impl InfoArgs {
    /// Queries the device or volume and prints its properties.
    pub fn run(self) -> Result<()> {
        let scheme = self.url.split_once("://").map_or("", |(scheme, _)| scheme);
        if ![driver::NVME.name, driver::VFIO_USER.name].contains(&scheme) {
            return self.volume();
        }
        let target = driver::DeviceTarget::parse(&self.url)?;
        let device = target.open()?;
        let info = Info::of(target.name(), &device);
        device.close();
        if self.json {
            let text = serde_json::to_string_pretty(&info).context("JSON")?;
            outln!("{text}");
        } else {
            info.print()?;
        }
        Ok(())
    }
}

impl InfoArgs {
    /// Prints the properties of a volume, which another process may have open.
    fn volume(&self) -> Result<()> {
        let options = OpenOptions {
            read_only: true,
            is_check: true,
            ..OpenOptions::default()
        };
        let opened = open::kinds(DeviceRegistry::default()).open(&self.url, options)?;
        let info = opened.volume.info();
        let shown = VolumeInfo {
            url: self.url.clone(),
            bytes: info.size,
            block_size: info.block_size.max(512),
            optimal_io: info.optimal_io,
            deallocate_granularity: info.deallocate_granularity,
            description: info.description,
        };
        if self.json {
            outln!("{}", serde_json::to_string_pretty(&shown)?);
            return Ok(());
        }
        outln!("{}", shown.url);
        outln!("  {}", shown.description);
        outln!(
            "  {} ({} bytes), blocks of {} bytes, best I/O in units of {}",
            size(shown.bytes),
            shown.bytes,
            shown.block_size,
            size(shown.optimal_io.into())
        );
        Ok(())
    }
}

/// Properties of a volume.
#[derive(Serialize)]
struct VolumeInfo {
    url: String,
    bytes: u64,
    /// Smallest block of a namespace on the volume.
    block_size: u32,
    optimal_io: u32,
    deallocate_granularity: u32,
    /// Kind of the volume and how it was opened.
    description: String,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Info {
    fn of(url: String, device: &Device) -> Info {
        let limits = device.limits();
        let features = [
            (limits.doorbell_buffers, "shadow doorbells"),
            (limits.volatile_cache, "volatile write cache"),
            (limits.sgl, "SGL"),
            (limits.compare, "Compare"),
            (limits.dataset_management, "Dataset Management"),
            (limits.write_zeroes, "Write Zeroes"),
        ];
        let namespaces = device.namespaces().into_iter();
        let namespaces = namespaces.map(|ns| NamespaceInfo::of(&ns, device));
        Info {
            url,
            controller: ControllerInfo::of(&device.identify(), &features),
            queues: Queues {
                io_queues: limits.io_queues,
                entries: limits.queue_entries,
                max_transfer_bytes: limits.max_transfer,
                page_bytes: limits.page_size,
                msix_vectors: limits.vectors,
            },
            namespaces: namespaces.collect(),
            health: device.health().ok().map(|smart| Health::of(&smart)),
        }
    }

    fn print(&self) -> Result<(), OutputError> {
        let c = &self.controller;
        outln!("{}", self.url);
        outln!(
            "  {}, serial {}, firmware {}",
            c.model,
            c.serial,
            c.firmware
        );
        outln!(
            "  NVMe {}, vendor {}, controller {}, {}",
            c.version,
            c.pci_vendor,
            c.controller_id,
            c.subnqn
        );
        outln!("  {}", c.features.join(", "));
        let q = &self.queues;
        outln!(
            "  up to {} I/O queue pairs of {} entries, {} MSI-X vectors, {} KiB a command, pages of {} bytes",
            q.io_queues,
            q.entries,
            q.msix_vectors,
            q.max_transfer_bytes / 1024,
            q.page_bytes
        );
        for ns in &self.namespaces {
            outln!(
                "  namespace {}: {}, {} blocks of {} bytes{}{}, nguid {}",
                ns.nsid,
                size(ns.bytes),
                ns.blocks,
                ns.block_size,
                match ns.atomic_unit {
                    unit if unit > ns.block_size => format!(", atomic units of {unit}"),
                    _ => String::new(),
                },
                if ns.write_protected {
                    ", write protected"
                } else {
                    ""
                },
                ns.nguid
            );
        }
        let Some(h) = &self.health else {
            return Ok(());
        };
        outln!(
            "  health: {}, {} \u{b0}C, {}% spare, {}% used, {} media errors, {} unsafe shutdowns",
            match h.critical_warning {
                0 => "no warning".into(),
                bits => format!("WARNING {bits:#04x}"),
            },
            i32::from(h.temperature_kelvin) - 273,
            h.available_spare_percent,
            h.used_percent,
            h.media_errors,
            h.unsafe_shutdowns
        );
        outln!(
            "  so far: {} reads of {}, {} writes of {}, {} power cycles, {} hours",
            h.host_reads,
            bytes(h.data_read_bytes),
            h.host_writes,
            bytes(h.data_written_bytes),
            h.power_cycles,
            h.power_on_hours
        );
        Ok(())
    }
}

/// Formats a number of bytes that may be larger than any disk.
fn bytes(count: u128) -> String {
    size(u64::try_from(count).unwrap_or(u64::MAX))
}

impl ControllerInfo {
    fn of(id: &IdentifyController, features: &[(bool, &'static str)]) -> Self {
        let ver = id.ver.get();
        Self {
            model: id.mn.to_string(),
            serial: id.sn.to_string(),
            firmware: id.fr.to_string(),
            subnqn: id.subnqn.to_string(),
            version: format!("{}.{}.{}", ver >> 16, ver >> 8 & 0xff, ver & 0xff),
            pci_vendor: format!("{:04x}", id.vid.get()),
            controller_id: id.cntlid.get(),
            features: features
                .iter()
                .filter(|(has, _)| *has)
                .map(|(_, name)| *name)
                .collect(),
        }
    }
}

impl NamespaceInfo {
    fn of(ns: &Namespace, device: &Device) -> Self {
        let most = device.limits().max_transfer;
        let atomic = ns.atomic_writes(&device.identify(), most);
        Self {
            nsid: ns.nsid,
            bytes: ns.bytes(),
            blocks: ns.blocks,
            block_size: ns.block_size(),
            atomic_unit: atomic.unit(),
            write_protected: ns.write_protected,
            nguid: hex(&ns.nguid),
            eui64: hex(&ns.eui64),
        }
    }
}

impl Health {
    fn of(smart: &Smart) -> Self {
        // Data units are thousands of 512 bytes (NVMe Base 2.1, 5.1.12.1.3).
        let units = |units: u128| units.saturating_mul(512_000);
        Self {
            critical_warning: smart.cw.into_bits(),
            temperature_kelvin: smart.ctemp.get(),
            available_spare_percent: smart.avsp,
            used_percent: smart.pused,
            data_read_bytes: units(smart.dur.get()),
            data_written_bytes: units(smart.duw.get()),
            host_reads: smart.hrc.get(),
            host_writes: smart.hwc.get(),
            power_cycles: smart.pwrc.get(),
            power_on_hours: smart.poh.get(),
            unsafe_shutdowns: smart.upl.get(),
            media_errors: smart.mdie.get(),
            error_log_entries: smart.neile.get(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use driver::Options;

    #[test]
    fn controller_info_is_serialized() {
        let transport = in_process::memory_disk(1 << 20).unwrap();
        let device = Device::open(transport, Options::default()).unwrap();
        let info = serde_json::to_value(Info::of("x".into(), &device)).unwrap();
        assert_eq!(info["namespaces"][0]["bytes"], 1 << 20);
        assert_eq!(info["namespaces"][0]["atomic_unit"], 512);
        assert_eq!(info["namespaces"][0]["nguid"], "01".repeat(16));
        assert_eq!(info["controller"]["version"], "2.1.0");
        let features = info["controller"]["features"].to_string();
        assert!(features.contains("shadow doorbells"), "{features}");
        assert_eq!(info["health"]["critical_warning"], 0);
        assert!(info["queues"]["io_queues"].as_u64().unwrap() > 0);
    }
}
