"""The same loop on `elasticflow.join`."""

import torch
from workload import BATCH, EPOCHS, Counted, CountedSGD, Samples, loss_of

import elasticflow

run = elasticflow.join()
torch.manual_seed(1234)
model = Counted()
optimizer = CountedSGD(model.parameters())
run.keep(model=model, optimizer=optimizer)
replicas = run.wrap(model)
for batch in run.batches(Samples(), size=BATCH, epochs=EPOCHS):
    optimizer.zero_grad()
    loss = loss_of(replicas(batch.inputs), batch.targets)
    (loss * batch.share).backward()
    optimizer.step()
    run.step(loss=loss)
run.finish()
