//! Identify ("NVMe Base 2.1", 5.1.13; "NVM Command Set 1.1", 4.1.5).

use super::{
    AdminOutcome, AdminResult, INVALID_FIELD, abort, erase, events, features, keep_alive, logs,
    persistent_events, placement, self_test, table,
};
use crate::ana;
use crate::config::NamespaceConfig;
use crate::control::Controller;
use crate::engine::{self, Namespace};
use crate::fabrics::FabricsConfig;
use crate::formats::{BlockFormat, Formats, available, plain_from};
use crate::pool::PooledNamespace;
use nvme::cmd::NSID_BROADCAST;
use nvme::cmd::admin::{Cns, Csi, IdentifyCdw10, IdentifyCdw11};
use nvme::feature::Fid;
use nvme::identify::{
    ControllerList, ControllerType, Ctratt, Descriptor, Dlfeat, Dpc, Dps, Flbas, Fpi, Frmw,
    IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, IndependentNamespace, IndependentNsfeat,
    IoCommandSetVector, IoCommandSets, LbaFormat, Mc, NamespaceDescriptors, Nmic, Nqn, Nsattr,
    Nsfeat, NsidList, Nstat, NvmController, NvmNamespace, Oaes, Ozcs, Pic, PowerState,
    PrimaryControllerCapabilities, QueueEntrySize, Rescap, SecondaryControllerList, Sgls, Vwc,
    ZonedController, ZonedNamespace, Zrwacap,
};
use nvme::log::AnaState;
use nvme::regs::{CcCss, Vs};
use nvme::{Command, Completion, Status};
use protection::{Guard, Type};
use zerocopy::{FromZeros, IntoBytes};

const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true);

/// Largest NSID that a list can start behind ("NVMe Base 2.1", 5.1.13.2.2).
const LAST_NSID: u32 = 0xffff_fffd;

/// Kind of namespace under an NSID, as far as Identify distinguishes them.
enum NamespaceKind<'a> {
    Active(&'a Namespace),
    /// Namespace of the controller's pool that is not attached to the controller.
    Allocated(PooledNamespace),
    /// NSID in the valid range that has no namespace.
    Inactive,
}

impl Controller {
    pub(super) fn identify(&mut self, command: &Command) -> AdminResult {
        let cdw10 = IdentifyCdw10::from_bits(command.cdw10.get());
        let cdw11 = IdentifyCdw11::from_bits(command.cdw11.get());
        let nsid = command.nsid.get();
        let page = match cdw10.cns() {
            Cns::NAMESPACE if nsid == NSID_BROADCAST && self.config.pool.is_some() => {
                self.common_namespace()
            }
            Cns::NAMESPACE => self.identify_namespace(&self.find(nsid)?),
            Cns::ALLOCATED_NAMESPACE => self.identify_namespace(&self.find_allocated(nsid)?),
            Cns::CONTROLLER => page(&self.identify_controller()),
            Cns::ACTIVE_NSID_LIST => self.namespace_list(nsid, None, false)?,
            Cns::ALLOCATED_NSID_LIST => self.namespace_list(nsid, None, true)?,
            Cns::IOCS_ACTIVE_NSID_LIST | Cns::IOCS_ALLOCATED_NSID_LIST => {
                self.check_csi(cdw11.csi())?;
                let allocated = cdw10.cns() == Cns::IOCS_ALLOCATED_NSID_LIST;
                self.namespace_list(nsid, Some(cdw11.csi()), allocated)?
            }
            Cns::NAMESPACE_DESCRIPTORS => self.namespace_descriptors(nsid)?,
            Cns::IOCS_NAMESPACE | Cns::IOCS_ALLOCATED_NAMESPACE => {
                self.check_csi(cdw11.csi())?;
                match (cdw11.csi(), self.find(nsid)?) {
                    (Csi::ZONED, NamespaceKind::Active(ns)) => page(&zoned_namespace(ns)?),
                    (Csi::NVM, NamespaceKind::Active(ns)) => page(&nvm_namespace(ns)),
                    _ => page(&NvmNamespace::new_zeroed()),
                }
            }
            Cns::IOCS_CONTROLLER => {
                self.check_csi(cdw11.csi())?;
                match cdw11.csi() {
                    // Both structures have the same size.
                    Csi::ZONED => page(&ZonedController::new_zeroed()),
                    _ => page(&self.nvm_controller()),
                }
            }
            Cns::IOCS_INDEPENDENT_NAMESPACE => self.independent_namespace(&self.find(nsid)?),
            Cns::IOCS_INDEPENDENT_ALLOCATED_NAMESPACE => {
                self.independent_namespace(&self.find_allocated(nsid)?)
            }
            Cns::NAMESPACE_CONTROLLER_LIST => match self.find(nsid)? {
                NamespaceKind::Active(_) => {
                    controller_list(self.controllers_with(nsid), cdw10.cntid())
                }
                _ => page(&ControllerList::new_zeroed()),
            },
            Cns::CONTROLLER_LIST => controller_list(self.controllers(), cdw10.cntid()),
            Cns::PRIMARY_CONTROLLER_CAPABILITIES => {
                let mut capabilities = PrimaryControllerCapabilities::new_zeroed();
                capabilities.cntlid = self.config.cntlid.into();
                page(&capabilities)
            }
            Cns::SECONDARY_CONTROLLER_LIST => page(&SecondaryControllerList::new_zeroed()),
            Cns::ENDURANCE_GROUP_LIST if self.has_placement() => {
                page(&self.endurance_groups(cdw11.cnssid()))
            }
            Cns::IO_COMMAND_SETS => {
                let mut sets = IoCommandSets::new_zeroed();
                sets.combinations[0] = IoCommandSetVector::new()
                    .with_nvm(true)
                    .with_zns(self.has_zones());
                page(&sets)
            }
            _ => return Err(INVALID_FIELD),
        };
        self.write_host(command, &*page)?;
        Ok(AdminOutcome::Done(0))
    }

    fn find(&self, nsid: u32) -> Result<NamespaceKind<'_>, Status> {
        if nsid == 0 || nsid > self.config.max_namespaces {
            return Err(INVALID_NAMESPACE);
        }
        let mut namespaces = self.active().filter(|ns| self.is_visible(ns));
        let found = namespaces.find(|ns| ns.config.nsid == nsid);
        Ok(found.map_or(NamespaceKind::Inactive, NamespaceKind::Active))
    }

    /// Finds a namespace, including those attached to no controller.
    fn find_allocated(&self, nsid: u32) -> Result<NamespaceKind<'_>, Status> {
        match self.find(nsid)? {
            NamespaceKind::Inactive => {
                let mut all = self.not_attached().into_iter();
                let found = all.find(|pooled| pooled.nsid == nsid);
                Ok(found.map_or(NamespaceKind::Inactive, NamespaceKind::Allocated))
            }
            found => Ok(found),
        }
    }

    /// Returns whether the host has selected a command set that has the namespace (CC.CSS).
    fn is_visible(&self, ns: &Namespace) -> bool {
        !ns.is_zoned() || self.cc.css() == CcCss::ALL_SUPPORTED
    }

    /// Returns whether there is a zoned namespace, and therefore the Zoned Namespace command set.
    pub(super) fn has_zones(&self) -> bool {
        self.active().any(Namespace::is_zoned)
    }

    /// Checks that the controller supports this I/O command set; the error is Invalid Field.
    fn check_csi(&self, csi: Csi) -> Result<(), Status> {
        match csi {
            Csi::NVM => Ok(()),
            Csi::ZONED if self.has_zones() => Ok(()),
            _ => Err(INVALID_FIELD),
        }
    }

    pub(super) fn identify_controller(&self) -> IdentifyController {
        let config = &self.config;
        let (pool, unallocated) = self.pool_capacity();
        let others = self
            .not_pooled()
            .map(|ns| u128::from(ns.blocks) << ns.shift);
        let capacity = pool + others.sum::<u128>();
        let volatile = self.has_write_cache();
        let mut page = IdentifyController::new_zeroed();
        page.vid = config.pci.vendor.into();
        page.ssvid = config.pci.subsystem_vendor.into();
        page.sn = config.sn();
        page.mn = config.mn();
        page.fr = config.fr();
        page.rab = 5;
        page.mdts = config.mdts;
        page.cntlid = config.cntlid.into();
        page.ver = Vs::V2_1.into_bits().into();
        page.oaes = Oaes::new().with_nsan(true).with_lsian(self.reports_lbas());
        // Independent of the present namespaces: hosts ask once, and namespaces may be attached
        // later.
        page.ctratt = Ctratt::new()
            .with_hids(true)
            .with_elbas(config.may_have_metadata());
        page.cntrltype = ControllerType::IO;
        page.nvmsr = 1; // an NVMe storage device
        page.oacs = table::oacs(self);
        if config.sanitizes() {
            page.sanicap = erase::sanicap();
        }
        page.acl_z = (abort::MAX_ABORTS - 1) as u8;
        page.aerl_z = (events::MAX_EVENT_REQUESTS - 1) as u8;
        page.frmw = Frmw::new().with_ffsro(true).with_nofs(1);
        page.lpa = logs::lpa();
        page.elpe_z = (logs::ERROR_ENTRIES - 1) as u8;
        page.wctemp = 343.into();
        page.pels = persistent_events::SIZE_64K.into();
        page.cctemp = 353.into();
        page.tnvmcap = capacity.into();
        page.unvmcap = unallocated.into();
        page.edstt = self_test::extended_minutes(capacity).into();
        page.kas = keep_alive::GRANULARITY_100MS.into();
        page.sqes = QueueEntrySize::exactly(Command::SIZE_LOG2);
        page.cqes = QueueEntrySize::exactly(Completion::SIZE_LOG2);
        page.maxcmd = (config.queue_entries as u16).into();
        page.nn = config.max_namespaces.into();
        // ONCS reports Select for features (none of which is saveable), and Timestamp.
        let offer = self.engine.offer();
        let oncs = engine::commands::oncs(offer);
        page.oncs = oncs
            .with_ssfs(true)
            .with_tss(features::is_supported(Fid::TIMESTAMP, offer));
        page.cdfs = engine::copy::FORMATS.into();
        page.vwc = Vwc::new().with_vwcp(volatile).with_fb(3);
        page.sgls = Sgls::new()
            .with_sgls(1)
            .with_sllldts(true)
            .with_mpcsd(config.may_have_metadata());
        page.mnan = config.max_namespaces.into();
        page.subnqn = self.subnqn();
        page.psd[0] = PowerState {
            mp: 2500.into(),
            enlat: 16.into(),
            exlat: 4.into(),
            ..Default::default()
        };
        if self.is_shared() {
            ana::describe(&mut page, ana::MAX_ANA_GROUP);
        }
        if self.has_placement() {
            page.ctratt = page.ctratt.with_egs(true).with_fdps(true);
            page.endgidmax = (config.max_namespaces as u16).into();
        }
        if let Some(fabrics) = &config.fabrics {
            fabrics.describe(&mut page);
        }
        if let Some(cloud) = &config.cloud {
            cloud.describe(&mut page);
        }
        page
    }

    /// Returns the NVM Subsystem NQN. [`ControllerConfig::check`](crate::ControllerConfig::check)
    /// has refused a configured one that is not valid.
    pub(super) fn subnqn(&self) -> Nqn {
        let config = &self.config;
        let text = config.subnqn.clone().unwrap_or_else(|| {
            // The NQN form for subsystems without a vendor's domain: a UUID ("NVMe Base 2.1",
            // 4.7) that is derived from the serial and model number.
            let mut uuid = fnv128(&[config.serial.as_bytes(), b"/", config.model.as_bytes()]);
            uuid[6] = uuid[6] & 0x0f | 0x80; // version 8: made by a rule of our own
            uuid[8] = uuid[8] & 0x3f | 0x80; // variant of RFC 9562
            let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
            let (a, b, c) = (hex(&uuid[..4]), hex(&uuid[4..6]), hex(&uuid[6..8]));
            let (d, e) = (hex(&uuid[8..10]), hex(&uuid[10..]));
            format!("nqn.2014-08.org.nvmexpress:uuid:{a}-{b}-{c}-{d}-{e}")
        });
        Nqn::new(&text).unwrap_or_default()
    }

    /// Returns the common properties of all namespaces that a host creates ("NVM Command Set
    /// 1.1", 4.1.5.1).
    fn common_namespace(&self) -> Page {
        let mut data = IdentifyNamespace::new_zeroed();
        let block_size = self
            .config
            .pool
            .as_ref()
            .map_or(512, |pool| pool.block_size());
        let formats: Vec<_> = plain_from(block_size).into_iter().map(Some).collect();
        describe_formats(&mut data, &formats, 0);
        data.fpi = Fpi::new().with_fpis(self.config.erases());
        page(&data)
    }

    fn identify_namespace(&self, found: &NamespaceKind<'_>) -> Page {
        let mut data = IdentifyNamespace::new_zeroed();
        let ns = match found {
            NamespaceKind::Active(ns) => ns,
            NamespaceKind::Allocated(pooled) => {
                data.nsze = pooled.blocks.into();
                data.ncap = pooled.blocks.into();
                data.nuse = pooled.blocks.into();
                data.nvmcap = u128::from(pooled.bytes()).into();
                data.nmic = Nmic::new().with_shrns(pooled.shared);
                data.fpi = Fpi::new().with_fpis(self.config.erases());
                data.nguid = pooled.nguid;
                data.eui64 = pooled.eui64();
                let first = self.config.pool.as_ref().map(|pool| pool.block_size());
                let formats = plain_from(first.unwrap_or(pooled.block_size));
                let fits = |size: u32| pooled.bytes().is_multiple_of(size.into());
                let formats = available(&formats, pooled.block_size, fits);
                describe_formats(&mut data, &formats, self.flbas_of(pooled).index());
                return page(&data);
            }
            NamespaceKind::Inactive => return page(&data),
        };
        let nsid = ns.config.nsid;
        let info = ns.config.volume.info();
        let in_blocks_z = |bytes: u32| ((bytes >> ns.shift).clamp(1, 0x1_0000) - 1) as u16;
        data.nsze = ns.blocks.into();
        data.ncap = ns.blocks.into();
        data.nuse = ns.blocks.into();
        data.nsfeat = Nsfeat::new().with_optperf(1);
        data.npwg_z = in_blocks_z(info.optimal_io).into();
        data.npwa_z = data.npwg_z;
        data.npdg_z = in_blocks_z(info.deallocate_granularity).into();
        data.npda_z = data.npdg_z;
        data.nows_z = data.npwg_z;
        // Reported for every namespace, because the controller has Copy, although zoned ones lack
        // it.
        let copy = engine::copy::CopyLimits::new(ns.shift);
        data.mssrl = copy.range.into();
        data.mcl = copy.command.into();
        data.msrc_z = copy.ranges_z;
        // Unwritten blocks of a zone read as the volume has them; blocks with metadata are not
        // deallocated.
        let zeroes = info.deallocate && info.zeroes_after_deallocate && !ns.is_fixed();
        if self.config.erases() {
            data.fpi = self.format_progress(nsid);
        }
        data.dlfeat = Dlfeat::new().with_drb(u8::from(zeroes)).with_wzds(zeroes);
        data.nmic = self.sharing_of(nsid).0;
        data.rescap = self.sharing_of(nsid).1;
        data.nvmcap = (u128::from(ns.blocks) << ns.shift).into();
        if let Some((group, state)) = self.ana_of(nsid) {
            data.anagrpid = group.into();
            if matches!(state, AnaState::INACCESSIBLE | AnaState::PERSISTENT_LOSS) {
                // In these ANA states, utilization and capacity are unknown; the size is not.
                data.nuse = 0.into();
                data.nvmcap = 0.into();
            }
        }
        data.endgid = placement::group_of(ns).into();
        data.nsattr = Nsattr::new().with_cwp(ns.read_only);
        data.nguid = ns.config.nguid;
        data.eui64 = ns.config.eui64;
        describe_formats(&mut data, &ns.config.lba_formats(), ns.config.lba_format());
        describe_metadata(&mut data, &ns.config);
        atomicity(&mut data, ns);
        if self.config.fabrics.is_some() {
            FabricsConfig::describe_namespace(&mut data);
        }
        if let Some(cloud) = &self.config.cloud {
            cloud.describe_namespace(nsid, &mut data);
        }
        page(&data)
    }

    fn independent_namespace(&self, found: &NamespaceKind<'_>) -> Page {
        let mut data = IndependentNamespace::new_zeroed();
        if let NamespaceKind::Allocated(pooled) = found {
            data.nmic = Nmic::new().with_shrns(pooled.shared);
            data.fpi = Fpi::new().with_fpis(self.config.erases());
            data.nstat = Nstat::new().with_nrdy(true);
        }
        if let NamespaceKind::Active(ns) = found {
            let nsid = ns.config.nsid;
            (data.nmic, data.rescap) = self.sharing_of(nsid);
            data.nsfeat = IndependentNsfeat::new().with_vwcnp(!ns.volatile_cache);
            data.nsattr = Nsattr::new().with_cwp(ns.read_only);
            if self.config.erases() {
                data.fpi = self.format_progress(nsid);
            }
            data.endgid = placement::group_of(ns).into();
            data.nstat = Nstat::new().with_nrdy(true);
            data.anagrpid = self.ana_of(nsid).map_or(0, |(group, _)| group).into();
            if self.config.fabrics.is_some() {
                FabricsConfig::describe_independent(&mut data);
            }
        }
        page(&data)
    }

    fn nvm_controller(&self) -> NvmController {
        let mut data = NvmController::new_zeroed();
        data.vsl = self.config.mdts;
        if self.active().any(|ns| ns.config.may_have_metadata()) {
            // Write Zeroes also writes the metadata of each block. Hosts read the limit before
            // they format.
            data.wzsl = self.config.mdts;
        }
        data.wusl = 0; // Write Uncorrectable has no limit
        data.dmrl = 0; // 256 ranges, the most that fit
        data.ver = 0x0001_0100.into();
        data
    }

    /// Namespaces behind that one: of one command set, or of all; those that the controller has, or
    /// all that are allocated.
    fn namespace_list(
        &self,
        after: u32,
        csi: Option<Csi>,
        allocated: bool,
    ) -> Result<Page, Status> {
        if after > LAST_NSID {
            return Err(INVALID_NAMESPACE);
        }
        let of_set = |ns: &&Namespace| csi.is_none_or(|csi| csi_of(ns) == csi);
        let namespaces = self.active().filter(|ns| self.is_visible(ns));
        let mut nsids: Vec<u32> = namespaces.filter(of_set).map(|ns| ns.config.nsid).collect();
        if allocated && csi.is_none_or(|csi| csi == Csi::NVM) {
            nsids.extend(self.not_attached().iter().map(|pooled| pooled.nsid));
        }
        nsids.retain(|&nsid| nsid > after);
        nsids.sort_unstable();
        Ok(page(&NsidList::from_iter(nsids)))
    }

    fn namespace_descriptors(&self, nsid: u32) -> Result<Page, Status> {
        let NamespaceKind::Active(ns) = self.find(nsid)? else {
            return Err(INVALID_NAMESPACE);
        };
        let descriptors = [
            (ns.config.eui64 != [0; 8]).then_some(Descriptor::Eui64(ns.config.eui64)),
            (ns.config.nguid != [0; 16]).then_some(Descriptor::Nguid(ns.config.nguid)),
            (ns.config.uuid != [0; 16]).then_some(Descriptor::Uuid(ns.config.uuid)),
            Some(Descriptor::Csi(csi_of(ns))),
        ];
        Ok(page(&NamespaceDescriptors::new(
            descriptors.into_iter().flatten(),
        )))
    }

    /// Returns whether a namespace is shared, and the reservation types it supports.
    fn sharing_of(&self, nsid: u32) -> (Nmic, Rescap) {
        let Some((_, can_persist)) = self.persistence(nsid) else {
            let mut pooled = self.pooled().into_iter();
            let shared = pooled.any(|pooled| pooled.nsid == nsid && pooled.shared);
            return (Nmic::new().with_shrns(shared), Rescap::new());
        };
        // All types; IEKEY as in NVMe 1.3 and later.
        let rescap = Rescap::new()
            .with_ptpls(can_persist)
            .with_wes(true)
            .with_eas(true)
            .with_weros(true)
            .with_earos(true)
            .with_wears(true)
            .with_eaars(true)
            .with_ieks(true);
        (Nmic::new().with_shrns(true), rescap)
    }
}

/// Reports the volume's guarantee of atomic writes ("NVM Command Set 1.1", 2.1.4): a unit that is
/// atomic for other commands and for power loss, and a boundary at each of its multiples, because
/// nothing is guaranteed across. If the unit is not larger than a block, the fields stay 0h. The
/// controller's fields do so always, because they hold for all namespaces and across boundaries.
/// ACWU concerns Compare and Write, which is not offered.
fn atomicity(data: &mut IdentifyNamespace, ns: &Namespace) {
    let unit = ns
        .config
        .volume
        .atomic_writes()
        .unit_of_blocks(1 << ns.shift);
    let Some(blocks_z) = (unit >> ns.shift).checked_sub(1) else {
        return;
    };
    // MAX_ATOMIC_UNIT is at most 128 blocks.
    let blocks_z = blocks_z as u16;
    data.nsfeat.set_nsabpns(true);
    data.nawun_z = blocks_z.into();
    data.nawupf_z = blocks_z.into();
    data.nabsn_z = blocks_z.into();
    data.nabspf_z = blocks_z.into();
}

/// Returns the Controller List page with the IDs that are at least `from`; `controllers` is sorted.
fn controller_list(controllers: Vec<u16>, from: u16) -> Page {
    let controllers = controllers.into_iter().filter(|cntlid| *cntlid >= from);
    page(&ControllerList::from_iter(controllers))
}

type Page = Box<[u8; IDENTIFY_SIZE]>;

/// Returns the bytes of an Identify data structure, each of which is 4096 bytes long.
fn page(data: &(impl IntoBytes + zerocopy::Immutable)) -> Page {
    let mut page = Box::new([0; IDENTIFY_SIZE]);
    for (to, from) in page.iter_mut().zip(data.as_bytes()) {
        *to = *from;
    }
    page
}

/// Returns the description of a zoned namespace.
fn zoned_namespace(ns: &Namespace) -> Result<ZonedNamespace, Status> {
    let zoned = ns.config.zones.as_ref().ok_or(INVALID_FIELD)?;
    let geometry = *zoned.geometry();
    let limit_z = |limit: Option<u32>| limit.map_or(u32::MAX, |limit| limit.saturating_sub(1));
    let mut data = ZonedNamespace::new_zeroed();
    data.ozcs = Ozcs::new().with_razb(true);
    data.mar_z = limit_z(geometry.max_active).into();
    data.mor_z = limit_z(geometry.max_open).into();
    data.lbafe[0].zsze = geometry.size.into();
    if let Some(zrwa) = geometry.zrwa {
        data.ozcs.set_zrwasup(true);
        data.numzrwa_z = limit_z(geometry.zrwa_resources()).into();
        data.zrwafg = zrwa.granularity.into();
        data.zrwasz = zrwa.size.into();
        data.zrwacap = Zrwacap::new().with_expflushsup(true);
    }
    Ok(data)
}

/// Sets the LBA formats of a namespace and the index of the present one. `None` is a format that
/// the namespace cannot have.
fn describe_formats(data: &mut IdentifyNamespace, formats: &[Option<BlockFormat>], index: u8) {
    for (to, format) in data.lbaf.iter_mut().zip(formats) {
        *to = LbaFormat::new(format.map_or(0, |format| format.block.trailing_zeros() as u8));
        to.ms = format.map_or(0, |format| format.metadata).into();
    }
    data.nlbaf_z = formats.len().saturating_sub(1) as u8;
    data.flbas = Flbas::for_format(index);
}

/// Sets the metadata fields of Identify Namespace: the current format and the capabilities. If
/// the host cannot choose a format, the capabilities are those of the current one.
fn describe_metadata(data: &mut IdentifyNamespace, config: &NamespaceConfig) {
    let format = config.format();
    let formats = config.formats.as_ref();
    let any = formats.is_some_and(Formats::has_metadata);
    let has = format.metadata > 0;
    data.flbas.set_mtelba(format.extended);
    data.mc = Mc::new()
        .with_mtelba(any || has && format.extended)
        .with_mtsmptr(any || has && !format.extended);
    let (kind, first) = match format.protection {
        Some((kind, first)) => (Some(kind), Some(first)),
        None => (None, None),
    };
    data.dpc = Dpc::new()
        .with_pit1s(any || kind == Some(Type::One))
        .with_pit2s(any || kind == Some(Type::Two))
        .with_pit3s(any || kind == Some(Type::Three))
        .with_pifb(any || first == Some(true))
        .with_pilb(any || first == Some(false));
    let kind = kind.map_or(0, |kind| kind as u8);
    data.dps = Dps::new().with_pit(kind).with_pip(first == Some(true));
}

/// Returns the structure of the NVM command set: guard format and storage tag size of each LBA
/// format (ELBAF), the capabilities they need (PIC), and the compared tag bits of the current
/// format (LBSTM).
fn nvm_namespace(ns: &Namespace) -> NvmNamespace {
    let mut data = NvmNamespace::new_zeroed();
    let mut formats = ns.config.lba_formats();
    let now = ns.config.format();
    // The current storage tag may be from an earlier configuration, until the host formats the
    // namespace.
    if let Some(current) = formats.get_mut(usize::from(ns.config.lba_format())) {
        *current = Some(now);
    }
    let (mut extended, mut tagged) = (false, false);
    for (to, format) in data.elbaf.iter_mut().zip(formats) {
        let Some(format) = format.filter(|format| format.metadata > 0) else {
            continue;
        };
        extended |= format.guard != Guard::Bits16;
        tagged |= format.storage.bits > 0;
        let pif: u32 = match format.guard {
            Guard::Bits16 => 0,
            Guard::Bits32 => 1,
            Guard::Bits64 => 2,
        };
        let bits = u32::from(format.storage.bits);
        *to = (bits | pif << 7).into();
    }
    data.pic = Pic::new()
        .with_pists16b(extended || tagged)
        .with_stcrs(tagged);
    if now.protection.is_some() {
        data.lbstm = now.storage.mask.into();
    }
    data
}

/// Returns the identifier (CSI) of the command set that a namespace belongs to.
fn csi_of(ns: &Namespace) -> Csi {
    if ns.is_zoned() { Csi::ZONED } else { Csi::NVM }
}

/// Returns the 128-bit FNV-1a hash of the concatenated `parts`.
fn fnv128(parts: &[&[u8]]) -> [u8; 16] {
    let mut hash = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128;
    for byte in parts.iter().copied().flatten() {
        hash = (hash ^ u128::from(*byte)).wrapping_mul(0x0100_0000_0000_0000_0000_013b);
    }
    hash.to_be_bytes()
}
