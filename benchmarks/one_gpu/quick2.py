import sys, time, os, collections, statistics
import torch, offbeat
from offbeat.methods import PipeDream, StaleWeights
from benchmarks.one_gpu.workloads import WORKLOADS
from benchmarks.one_gpu.contestants import graph
from benchmarks.one_gpu.run import turn
torch.backends.cudnn.benchmark=True
torch.set_float32_matmul_precision("high")
for name in sys.argv[1:]:
    w=WORKLOADS[name]; b=w.batches()
    g=graph(w); base=statistics.median(turn(g,b,20) for _ in range(3)); print(name,'graph',round(base,3),flush=True)
    for K in (4,8):
        for label,method in [('2(K-1-k)',StaleWeights()),('K-1-k',PipeDream(backward='current'))]:
            t=time.perf_counter()
            tr=offbeat.Trainer(w.made(),loss=w.loss,optimizer=w.optimizer,method=method,autocast=w.autocast,engine='streams',stages=K,balance='measured')
            for i in range(50): tr.step(*b[i%8])
            torch.cuda.synchronize(); t=time.perf_counter()-t
            ms=statistics.median(turn(tr.step,b,40) for _ in range(3))
            torch.cuda.synchronize(); h=time.perf_counter()
            for i in range(8): tr.step(*b[i%8])
            h=(time.perf_counter()-h)/8*1e3
            torch.cuda.synchronize()
            d=collections.defaultdict(list)
            for e in list(tr.ledger)[-3*K*60:]: d[(e.stage,e.kind)].append((e.end_s-e.start_s)*1e3)
            d={k:statistics.median(v) for k,v in d.items()}
            print(name,K,label,'%.3f ms ratio %.2f host %.2f warm %.1f s'%(ms,base/ms,h,t),tr.cuts,[(round(d[k,'F'],1),round(d[k,'B'],1)) for k in range(K)],flush=True)
            del tr
